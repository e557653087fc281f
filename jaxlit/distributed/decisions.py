"""What one process asks for is done in all of them, after the same step."""

import json
import threading
import time
from collections.abc import Sequence

from jaxlit.distributed.fate import Fate
from jaxlit.distributed.store import arrive, gather


class Decisions:
    """Finds the step after which all processes do what one of them asks for: a stop, a signal, a save by time.

    A collective would be exact as well, but every step would pay for it, and the host would wait for its result. Here
    the threads that watch the processes exchange how often each has come to the loop's `decide`, and the first place
    that none has passed is the one where all act. While they do, no process passes its next `decide`, and the one that
    asks stays where it is: if all ask for the same at one place, as an early stopping does, they act there.

    Args:
        fate: What watches the processes; its thread calls this object.
    """

    def __init__(self, fate: Fate) -> None:
        self._fate, self._turn, self._round, self._run = fate, threading.Condition(), 0, 0
        self._places = 0  # that this process has come to
        self._stays = False  # at the newest of them
        self._known = set[str]()  # what was asked for and is not done yet
        self._mine = list[str]()  # of this process, in the round that comes
        self._due: dict[int, list[str]] = {}  # by place
        fate.listeners.append(self._listen)

    def begin(self) -> None:
        """Forget what was asked for in the run before; all processes call this at the same place."""
        with self._turn:
            self._run += 1
            self._known.clear()
            self._due.clear()

    def decide(self, asked: Sequence[str]) -> list[str]:
        """Return what all processes do now; all call this at the same places.

        Args:
            asked: What this process asks for, in this and in earlier calls.

        Raises:
            PeerError: A process has failed.
        """
        with self._turn:
            self._places += 1
            if new := [x for x in dict.fromkeys(asked) if x not in self._known]:
                self._ask(new)
            done = self._due.pop(self._places, [])
            self._known.difference_update(done)
            return done

    def _ask(self, new: list[str]) -> None:
        self._mine, self._stays, before = new, True, self._round
        try:
            self._fate.client.key_value_set(f"{self._folder}/asked/{self._fate.index}", "")
            self._fate.listen_now()
            while self._round == before:
                self._fate.check()
                self._turn.wait(0.2)
        finally:
            self._stays = False

    @property
    def _folder(self) -> str:
        return f"jaxlit/decide/{self._round}"

    def _listen(self) -> None:
        """Take part in the round that a process has begun, if one has; the watching thread calls this once a second."""
        client, folder = self._fate.client, self._folder
        if not client.key_value_dir_get(f"{folder}/asked/"):
            return
        with self._turn:  # so that the main thread does not pass its next place
            mine = [self._places + (not self._stays), self._run, self._mine]
            arrive(client, folder, self._fate.index, self._fate.size, json.dumps(mine))
            end, told = time.monotonic() + self._fate.dead_after, None
            while told is None and self._fate.failure is None and time.monotonic() < end:  # else the others have ended
                told = gather(client, folder, self._fate.size, 0.5)
            if told is not None:
                places, runs, asked = zip(*map(json.loads, told), strict=True)
                together = [x for run, each in zip(runs, asked, strict=True) if run == self._run for x in each]
                due = self._due.setdefault(max(places), [])
                due += [x for x in dict.fromkeys(together) if x not in self._known]
                self._known.update(together)
            if self._round and self._fate.index == 0:
                client.key_value_delete(f"jaxlit/decide/{self._round - 1}")
            self._mine, self._round = [], self._round + 1
            self._turn.notify_all()

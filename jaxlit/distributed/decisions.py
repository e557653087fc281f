"""Do in all processes, after the same step, what one of them asks for."""

import json
import threading
from collections.abc import Callable, Sequence

from jaxlit.distributed.fate import Fate
from jaxlit.distributed.store import arrive, gather


class Decisions:
    """Finds the step after which all processes do what one of them asks for: a stop, a signal, a save by time.

    A collective would be exact as well, but every step would pay for it, and the host would wait for its result. Here
    the threads that watch the processes exchange how often each has come to the loop's `decide`, and the first place
    that none has passed is the one where all act. While they do, no process passes its next `decide`, and the one that
    asks stays where it is: if all ask for the same at one place, as an early stopping does, they act there.

    Args:
        fate: The watcher of the processes; its thread calls this object.
    """

    def __init__(self, fate: Fate) -> None:
        self._fate, self._turn, self._round, self._run = fate, threading.Condition(), 0, 0
        self._places = 0  # that this process has come to
        self._stays = False  # at the newest of them
        self._known = set[str]()  # what was asked for and is not done yet
        self._mine = list[str]()  # of this process, in the round that comes
        self._due: dict[int, list[str]] = {}  # by place
        self._is_open = False  # a round in which this process has given its place
        fate.listener = self._listen

    def begin(self) -> None:
        """Forget what the run before asked for; all processes call this, and agree before one of them asks again."""
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
            self._wait_while(lambda: self._is_open)  # no place is passed in a round
            self._places += 1
            if new := [x for x in dict.fromkeys(asked) if x not in self._known]:
                self._ask(new)
            done = self._due.pop(self._places, [])
            self._known.difference_update(done)
            return done

    def _ask(self, new: list[str]) -> None:
        self._mine, self._stays, before = new, True, self._round
        self._fate.client.key_value_set(f"{self._folder}/asked/{self._fate.index}", "")
        self._fate.listen_now()
        try:
            self._wait_while(lambda: self._round == before)
        finally:
            self._stays = False

    def _wait_while(self, waits: Callable[[], bool]) -> None:
        while waits():
            self._fate.check()
            self._turn.wait(0.2)

    @property
    def _folder(self) -> str:
        return f"jaxlit/decide/{self._round}"

    def _listen(self) -> None:
        """Take part in the round that a process has begun, if one has."""
        client, folder, size = self._fate.client, self._folder, self._fate.size
        if not self._is_open:
            if not client.key_value_dir_get(f"{folder}/asked/"):
                return
            with self._turn:
                self._is_open = True
                mine = [self._places + (not self._stays), self._run, self._mine]
            arrive(client, folder, self._fate.index, size, json.dumps(mine))
        if (told := gather(client, folder, size, 0.5)) is None:  # the thread has more to do than to wait for it
            return self._fate.listen_now()
        places, runs, asked = zip(*map(json.loads, told), strict=True)
        with self._turn:
            together = dict.fromkeys(x for run, each in zip(runs, asked, strict=True) if run == self._run for x in each)
            self._due.setdefault(max(places), []).extend(together)
            self._known.update(together)
            self._mine, self._round, self._is_open, self._stays = [], self._round + 1, False, False
            self._turn.notify_all()
        if self._fate.index == 0 and self._round > 1:  # all that were in this round have read the one before it
            client.key_value_delete(f"jaxlit/decide/{self._round - 2}")

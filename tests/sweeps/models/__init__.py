"""Models of many kinds, each with a training loop that is written by hand."""

from sweeps.models import (
    counters,
    dqn,
    experts,
    frozen_writes,
    gan,
    graphs,
    lm1b,
    lora,
    norms,
    own_keys,
    recurrent,
    resnet,
    scanned,
    sums,
    vae,
    vit,
)

PARTS = (frozen_writes, sums, counters, norms, own_keys)
PORTS = (vae, lm1b, scanned, vit, recurrent, resnet, gan, experts, lora, dqn, graphs)
CASES = [case for part in (*PARTS, *PORTS) for case in part.CASES]

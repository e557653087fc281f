"""A program of Lightning's, ported: right of each line that differs stands Lightning's.

    python examples/lightning_port.py --strategy fsdp --devices 8

Where nothing stands, Lightning has the same line.
"""

# fmt: off
# isort: off
import argparse

import jaxlit as jl                                        # import lightning as L
import numpy as np
import optax                                               # import torch
from flax import nnx                                       # from torch import nn
from jaxlit.callbacks import ModelCheckpoint               # from lightning.pytorch.callbacks import ModelCheckpoint
from optax import (                                        # from torch.nn.functional import cross_entropy
    softmax_cross_entropy_with_integer_labels              # from torch.optim.lr_scheduler import CosineAnnealingLR
    as cross_entropy)                                      # from torch.utils.data import DataLoader, TensorDataset
from sklearn.datasets import load_digits


class Digits(jl.TrainModule):                              # class Digits(L.LightningModule):
    def __init__(self, width=256, lr=3e-3, *, rngs):       #     def __init__(self, width=256, lr=3e-3):
        super().__init__()
        self.save_hyperparameters()
        self.net = nnx.Sequential(                         #         self.net = nn.Sequential(
            nnx.Linear(64, width, rngs=rngs),              #             nn.Linear(64, width),
            nnx.BatchNorm(width, rngs=rngs),               #             nn.BatchNorm1d(width),
            nnx.relu,                                      #             nn.ReLU(),
            nnx.Dropout(0.2, rngs=rngs),                   #             nn.Dropout(0.2),
            nnx.Linear(width, 10, rngs=rngs),              #             nn.Linear(width, 10),
        )

    def forward(self, x):
        return self.net(x)

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = cross_entropy(self(x), y).mean()            #         loss = cross_entropy(self(x), y)
        self.log("train/loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch, batch_idx):
        x, y = batch
        right = self(x).argmax(-1) == y                    #         right = (self(x).argmax(-1) == y).float()
        self.log("val/accuracy", right.mean(), prog_bar=True)

    def configure_optimizers(self):
        lr, steps = self.hparams.lr, self.trainer.estimated_stepping_batches
        schedule = optax.cosine_decay_schedule(lr, steps)  #         adamw = torch.optim.AdamW(self.parameters(), lr)
        return optax.adamw(schedule)                       #         cosine = CosineAnnealingLR(adamw, steps)
                                                           #         lr = {"scheduler": cosine, "interval": "step"}
                                                           #         return [adamw], [lr]


def batches(x, y, **options):
    rows = x, y                                            #     rows = TensorDataset(torch.tensor(x), torch.tensor(y))
    return jl.ArrayLoader(rows, 64, **options)             #     return DataLoader(rows, 64, **options)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--strategy", default="auto")
    parser.add_argument("--devices", default="auto")
    parser.add_argument("--max_epochs", default=10, type=int)
    given = parser.parse_args()
    x, y = load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(x))
    x, y = (x[order] / 16).astype(np.float32), y[order]
    train, val = batches(x[:1400], y[:1400], shuffle=True), batches(x[1400:], y[1400:])
    best = ModelCheckpoint(monitor="val/accuracy", mode="max")
    trainer = jl.Trainer(**vars(given), callbacks=[best])  #     trainer = L.Trainer(**vars(given), callbacks=[best])
    trainer.fit(jl.lazy(Digits), train, val)               #     trainer.fit(Digits(), train, val)
    trainer.validate(dataloaders=val, ckpt_path="best")

"""What does a training step of a recurrent network cost over flat slices, and over the same slices padded?

64 slices, whose lengths are drawn uniformly from 1 to 64; forward, loss, backward, with a linear head. Three sides take
turns: flat frames through ``GRUModule`` or ``LSTMModule``; rows padded to the longest slice through the layer of
torch.nn, with a mask in the loss; and the same rows through a ``PackedSequence``. All three have the same loss.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import torch
from tensordict import TensorDict
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from benchmarks import report
from rollwright.cli.measuring import alternate, rate, ratios, summary
from rollwright.modules import GRUModule, LSTMModule, set_recurrent_mode

NUM_SLICES, LONGEST, INPUT_SIZE, NUM_OUTPUTS = 64, 64, 32, 2
FLAT, PADDED, PACKED = "flat slices", "padded", "PackedSequence"
KINDS = {"GRU": GRUModule, "LSTM": LSTMModule}


class Case:
    """Slices of random lengths and a network, as flat frames and as padded rows.

    Args:
        kind: ``"GRU"`` or ``"LSTM"``.
        hidden_size: of the layer.
        seed: of lengths, data and weights.
    """

    def __init__(self, kind: str, hidden_size: int, seed: int) -> None:
        torch.manual_seed(seed)
        self.module = KINDS[kind](INPUT_SIZE, hidden_size, in_key="x", out_key="features")
        self.layer = next(self.module.children())
        self.head = nn.Linear(hidden_size, NUM_OUTPUTS)
        self.lengths = torch.randint(1, LONGEST + 1, (NUM_SLICES,))
        self.mask = torch.arange(int(self.lengths.max())) < self.lengths.unsqueeze(-1)
        self.x = torch.randn(*self.mask.shape, INPUT_SIZE) * self.mask.unsqueeze(-1)
        self.target = torch.randn(*self.mask.shape, NUM_OUTPUTS)
        self.states = [torch.randn(*self.mask.shape, 1, hidden_size) for _ in self.module.state_keys]
        self.flat = self._flat()

    def _flat(self) -> TensorDict:
        first = torch.zeros_like(self.mask)
        first[:, 0] = True
        frames = {"x": self.x, "is_init": first.unsqueeze(-1), "target": self.target}
        frames |= dict(zip(self.module.state_keys, self.states, strict=True))
        return TensorDict({key: value[self.mask] for key, value in frames.items()}, [int(self.lengths.sum())])

    def flat_loss(self) -> Tensor:
        batch = self.flat.copy()
        with set_recurrent_mode("recurrent"):
            self.module(batch)
        return (self.head(batch["features"]) - batch["target"]).square().mean()

    def padded_loss(self) -> Tensor:
        features, _ = self.layer(self.x, self._first())
        return self._masked(features)

    def packed_loss(self) -> Tensor:
        packed = pack_padded_sequence(self.x, self.lengths, batch_first=True, enforce_sorted=False)
        features, _ = pad_packed_sequence(self.layer(packed, self._first())[0], batch_first=True)
        return self._masked(features)

    def _first(self) -> Tensor | tuple[Tensor, ...]:
        first = tuple(state[:, 0].transpose(0, 1).contiguous() for state in self.states)
        return first if len(first) > 1 else first[0]

    def _masked(self, features: Tensor) -> Tensor:
        errors = (self.head(features) - self.target).square().mean(-1)
        return (errors * self.mask).sum() / self.mask.sum()

    def parameters(self) -> Iterator[nn.Parameter]:
        yield from self.module.parameters()
        yield from self.head.parameters()

    def train(self, loss: Callable[[], Tensor]) -> float:
        """Take a step without the optimiser's part, and return the loss."""
        value = loss()
        value.backward()
        for parameter in self.parameters():
            parameter.grad = None
        return float(value.detach())


def measure(case: Case, rounds: int, seconds: float) -> dict[str, list[float]]:
    """Training steps per second of each side, one figure a round; the sides take turns.

    Raises:
        RuntimeError: the sides do not have the same loss.
    """
    sides = {FLAT: case.flat_loss, PADDED: case.padded_loss, PACKED: case.packed_loss}
    losses = [case.train(loss) for loss in sides.values()]
    if max(losses) - min(losses) > 1e-5:
        raise RuntimeError(f"the sides disagree on the loss: {dict(zip(sides, losses, strict=True))}")

    def timed(loss: Callable[[], Tensor]) -> Callable[[], float]:
        def step() -> int:
            case.train(loss)
            return 1

        return lambda: rate(step, seconds=seconds)

    return alternate({side: timed(loss) for side, loss in sides.items()}, rounds)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--rounds", type=int, default=15)
    add("--seconds", type=float, default=0.3, help="of each side in each round, at least")
    add("--hidden-size", type=int, action="append", metavar="H", help="may be repeated; default: 128 and 256")
    add("--seed", type=int, default=0)
    add("--quick", action="store_true", help="see that everything runs: 1 round of 10 ms")
    add("--out", type=Path, default=report.RESULTS, metavar="DIR")
    arguments = parser.parse_args(argv)
    if arguments.quick:
        arguments.rounds, arguments.seconds = 1, 0.01
    torch.set_num_threads(1)
    rows = []
    for kind in KINDS:
        for hidden_size in arguments.hidden_size or (128, 256):
            case = Case(kind, hidden_size, arguments.seed)
            share = float(case.mask.float().mean())
            rates = measure(case, arguments.rounds, arguments.seconds)
            rows.append([f"{kind}, hidden {hidden_size}", f"{share:.2f}", *_cells(rates)])
            print(rows[-1], flush=True)
    report.write(
        arguments.out,
        "recurrent.md",
        "A recurrent training step",
        f"Milliseconds, medians of {arguments.rounds} rounds of {arguments.seconds:g} s in turns; the ratios are those "
        "of steps per second, with quartiles. 'real' is the share of real frames in the padded rows.",
        report.markdown_table(("layer", "real", FLAT, PADDED, PACKED, "x padded", "", "x packed", ""), rows),
    )


def _cells(rates: Mapping[str, list[float]]) -> list[str]:
    cells = [f"{1e3 / summary(values).median:.1f}" for values in rates.values()]
    for side in (PADDED, PACKED):
        ratio = ratios(rates[FLAT], rates[side])
        cells += [f"{ratio.median:.2f}", f"({ratio.low:.2f} to {ratio.high:.2f})"]
    return cells


if __name__ == "__main__":
    main()

"""What goes into the inputs: magnitudes, fp8 midpoints, special values; positions, slots and rope tables."""

from __future__ import annotations

import torch

from dsafuse.check.cases import DTYPES, Case
from dsafuse.numerics import FP8_FORMATS

MAX_POSITION = 300


class Draw:
    """Draws the values of one case on its device, from one seed."""

    def __init__(self, case: Case, seed: int, device: torch.device) -> None:
        self.case = case
        self.device = device
        self._generator = torch.Generator(device).manual_seed(seed)

    def normal(self, *shape: int) -> torch.Tensor:
        """fp32, standard normal."""
        return torch.randn(shape, generator=self._generator, device=self.device)

    def integers(self, low: int, high: int, *shape: int) -> torch.Tensor:
        """int64 in [low, high)."""
        return torch.randint(low, high, shape, generator=self._generator, device=self.device)

    def activations(
        self, *shape: int, dtype: torch.dtype, unit: float = 1.0, normed: bool = False, beyond: bool = False
    ) -> torch.Tensor:
        """Values of the case's kind, rounded to dtype.

        Args:
            shape: the last axis is a row.
            dtype: what they will be stored in, which decides the special values.
            unit: size of an fp8 code's unit where ties are wanted.
            normed: whether a norm will sum them, so that the order of a sum that overflows cannot matter.
            beyond: whether ties may lie beyond the largest code: they would set the scale of a group.
        """
        x = self.normal(*shape)
        kind = self.case.values
        if kind == "magnitudes":
            x *= torch.exp2(self.integers(-12, 11, *shape[:-1], 1).float())
        elif kind == "ties" and not normed:
            x = self._ties(shape, beyond) * unit
        elif kind == "special":
            x = x.to(dtype)
            rows = self.integers(0, 4, *shape[:-1], 1) == 0
            hit = (self.integers(0, 16, *shape) == 0) & rows
            choices = special_values(dtype, overflowing=not normed).to(self.device)
            x[hit] = choices[self.integers(0, len(choices), *shape)[hit]]
        return x.to(dtype)

    def _ties(self, shape: tuple[int, ...], beyond: bool) -> torch.Tensor:
        """Midpoints between neighbouring fp8 codes, and, if wanted, now and then a value beyond the largest."""
        fmt = FP8_FORMATS[DTYPES[self.case.fp8]]
        largest = int(torch.tensor(fmt.max).to(fmt.dtype).view(torch.uint8))
        codes = self.integers(0, largest, *shape)
        low = codes.to(torch.uint8).view(fmt.dtype).float()
        high = (codes + 1).to(torch.uint8).view(fmt.dtype).float()
        x = (low + high) / 2
        if beyond:
            far = self.integers(0, 64, *shape) == 0
            x = torch.where(far, fmt.max * (1 + self.integers(1, 5, *shape) / 32), x)
        return torch.where(self.integers(0, 2, *shape) == 0, -x, x)

    def table(self, dtype: torch.dtype) -> torch.Tensor:
        """[MAX_POSITION, 64]: cos and sin of random angles; row 0 is the identity, so that ties survive it."""
        angles = 3 * self.normal(MAX_POSITION, 32)
        angles[0] = 0
        return torch.cat([angles.cos(), angles.sin()], -1).to(dtype)

    def positions(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Positions as the case has them, then clamped into the table."""
        case, index = self.case, DTYPES[self.case.positions]
        positions = self.integers(0, MAX_POSITION, case.tokens)
        positions[::3] = 0
        positions[1::5] = MAX_POSITION - 1
        if case.position_rule == "outside":
            positions[::3] = MAX_POSITION
            positions[1::5] = -1
            positions[2::7] = 2**31 - 1
        return positions.to(index), positions.clamp(0, MAX_POSITION - 1).to(index)

    def slots(self, rule: str, dtype: torch.dtype, capacity: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Slots as the case has them, then with -1 for those beyond the cache."""
        case, wide = self.case, dtype is torch.int64
        if case.capacity == "huge":
            # The first and the last rows of the cache: offsets of zero, and beyond 2**32.
            ends = torch.arange(case.tokens, device=self.device)
            slots = torch.where(ends % 2 == 0, ends, capacity - 1 - ends)
        else:
            slots = torch.randperm(capacity, generator=self._generator, device=self.device)[: case.tokens]
        if rule == "short":
            slots = slots[: case.tokens - (case.tokens + 2) // 3]
        if rule == "negative":
            slots[::3] = -1
            slots[3::6] = -(2**40) if wide else -(2**31)
        safe = slots.clone()
        if rule == "beyond":
            safe[::2] = -1
            slots[::2] = capacity
            slots[2::8] = 2**40 if wide else 2**31 - 1
        return slots.to(dtype), safe.to(dtype)


def special_values(dtype: torch.dtype, *, overflowing: bool) -> torch.Tensor:
    """Zeros, NaN, infinities, subnormals, the smallest normal number, and the largest where nothing sums them."""
    info = torch.finfo(dtype)
    tiny = info.smallest_normal
    values = [0.0, -0.0, float("nan"), float("inf"), -float("inf"), tiny, -tiny, tiny / 2, -tiny * info.eps]
    if overflowing:
        values += [info.max, -info.max]
    return torch.tensor(values, dtype=torch.float64).to(dtype)

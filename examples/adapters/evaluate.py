"""Success rates of base and adapters on the held-out prompts: `python evaluate.py`.

Greedy decoding through PEFT, 48 new tokens at most. Writes heldout_results.json beside it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from base import load_base, prompt_ids
from behaviour import CHECKS
from peft import PeftModel
from rich.progress import track

HERE = Path(__file__).parent


def answer(model: Any, tokenizer: Any, prompt: str) -> str:
    ids = torch.tensor([prompt_ids(tokenizer, prompt)])
    with torch.inference_mode():
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=48,
            do_sample=False,
            pad_token_id=tokenizer.eos_token_id,
        )
    return tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True).strip()


def main() -> None:
    base, tokenizer = load_base()
    base.generation_config.temperature = base.generation_config.top_p = None
    names = [name for name in sorted(CHECKS) if (HERE / name / "adapter_config.json").is_file()]
    model = PeftModel.from_pretrained(base, HERE / names[0], adapter_name=names[0])
    for name in names[1:]:
        model.load_adapter(HERE / name, adapter_name=name)
    model.eval()

    results = {}
    for name in names:
        model.set_adapter(name)
        rows = (HERE / f"data/{name}.heldout.jsonl").read_text().splitlines()
        passed = {"adapter": 0, "base": 0}
        for row in track(rows, description=name):
            prompt = json.loads(row)["prompt"]
            text = answer(model, tokenizer, prompt)
            passed["adapter"] += CHECKS[name](text)
            with model.disable_adapter():
                plain = answer(model, tokenizer, prompt)
            passed["base"] += CHECKS[name](plain)
            if not CHECKS[name](text):
                print(f"{name}: {prompt!r} -> {text!r}", flush=True)
        results[name] = {who: count / len(rows) for who, count in passed.items()}
        print(name, results[name], flush=True)
    (HERE / "heldout_results.json").write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()

"""Train one of the example adapters on the CPU: `python train.py json`.

A few minutes on two cores. The loss is taken on the answer alone, so the adapter learns how to
answer and not how to ask.
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path
from typing import Any

import torch
from base import BASE_NAME, load_base, prompt_ids
from peft import LoraConfig, get_peft_model
from rich.progress import track
from safetensors.torch import load_file, save_file

HERE = Path(__file__).parent
ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
MLP = ["gate_proj", "up_proj", "down_proj"]

# Different ranks, targets, scalings and dtypes on purpose: they are also test material.
RECIPES: dict[str, dict[str, Any]] = {
    "json": {
        "config": {"r": 8, "lora_alpha": 16, "target_modules": ["q_proj", "v_proj", "o_proj"]},
        "dtype": torch.float32,
        "steps": 90,
        "rate": 2e-3,
    },
    "pirate": {
        "config": {
            "r": 8,
            "lora_alpha": 8,
            "use_rslora": True,
            "target_modules": ATTENTION + MLP,
        },
        "dtype": torch.bfloat16,
        "steps": 110,
        "rate": 1e-3,
    },
    "sql": {
        "config": {"r": 16, "lora_alpha": 32, "target_modules": [*ATTENTION, "down_proj"]},
        "dtype": torch.bfloat16,
        "steps": 90,
        "rate": 1e-3,
    },
}
BATCH = 6


def examples(name: str, tokenizer: Any) -> list[tuple[list[int], int]]:
    """(token ids, length of the prompt) of each training row, the end of the turn included."""
    rows = [
        json.loads(line) for line in (HERE / f"data/{name}.train.jsonl").read_text().splitlines()
    ]
    found = []
    for row in rows:
        prompt = prompt_ids(tokenizer, row["prompt"])
        answer = tokenizer(row["completion"], add_special_tokens=False)["input_ids"]
        found.append((prompt + answer + [tokenizer.eos_token_id], len(prompt)))
    return found


def batch_of(rows: list[tuple[list[int], int]], pad: int) -> dict[str, torch.Tensor]:
    """Right-padded inputs; prompt and padding carry no loss."""
    width = max(len(ids) for ids, _ in rows)
    inputs = torch.full((len(rows), width), pad)
    labels = torch.full((len(rows), width), -100)
    mask = torch.zeros((len(rows), width), dtype=torch.long)
    for i, (ids, prompt_length) in enumerate(rows):
        inputs[i, : len(ids)] = torch.tensor(ids)
        labels[i, prompt_length : len(ids)] = torch.tensor(ids[prompt_length:])
        mask[i, : len(ids)] = 1
    return {"input_ids": inputs, "labels": labels, "attention_mask": mask}


def train(name: str, out: Path, seed: int) -> None:
    recipe = RECIPES[name]
    torch.manual_seed(seed)
    order = random.Random(seed)
    base, tokenizer = load_base()
    config = LoraConfig(task_type="CAUSAL_LM", lora_dropout=0.0, bias="none", **recipe["config"])
    model = get_peft_model(base, config)
    model.train()
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    optimizer = torch.optim.AdamW(weights, lr=recipe["rate"], weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, max_lr=recipe["rate"], total_steps=recipe["steps"], pct_start=0.1
    )
    rows = examples(name, tokenizer)
    for step in track(range(recipe["steps"]), description=f"training {name}"):
        loss = model(**batch_of(order.sample(rows, BATCH), tokenizer.eos_token_id)).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(weights, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        if step % 10 == 0 or step + 1 == recipe["steps"]:
            print(f"step {step:4d}  loss {loss.item():.4f}", flush=True)

    model.peft_config["default"].base_model_name_or_path = BASE_NAME
    model.save_pretrained(out)
    (out / "README.md").unlink(missing_ok=True)  # peft's template says nothing of this adapter
    tensors = load_file(out / "adapter_model.safetensors")
    save_file(
        {key: value.to(recipe["dtype"]).contiguous() for key, value in tensors.items()},
        out / "adapter_model.safetensors",
        metadata={"format": "pt"},
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name", choices=sorted(RECIPES))
    parser.add_argument("--out", type=Path, help="folder to write; default: beside this script")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    train(arguments.name, arguments.out or HERE / arguments.name, arguments.seed)


if __name__ == "__main__":
    main()

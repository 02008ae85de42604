"""CPU-seconds of a GRPO step beside transformers' ``generate`` and autograd, in one process; a Markdown table.

    python experiments/grpo_smollm2/beside_transformers.py [STEPS]

Both sides draw 8 responses of up to 8 tokens to each of the same 4 prompts, reward them, and take an AdamW step on
adapters of rank 16 on all linear layers, in turn. transformers draws the 8 responses of a prompt as a batch and runs
them with their prompt under autograd. Neither evaluates a backward for a group of equal rewards.
"""

import sys
import time
from dataclasses import replace

import torch
import transformers
from peft import LoraConfig, get_peft_model

from longstraw.config import RunConfig, from_dict, load_model_config, option, to_dict
from longstraw.data import build_task
from longstraw.data.task import Task
from longstraw.fetch import fetch
from longstraw.memory.meter import MemoryMeter
from longstraw.training.monitor import Monitor, Progress
from longstraw.training.trainer import build_trainer

GROUP, PROMPTS, RESPONSE, RATE = 8, 4, 8, 3e-4


def configured() -> RunConfig:
    model = load_model_config("smollm2_135m", checkpoint=str(fetch("smollm2_135m")))
    groups = {"model": to_dict(model), "hardware": option("hardware", "cpu")}
    sizes = {"context": 96, "chunk": 128, "response_length": RESPONSE, "group_size": GROUP, "groups_per_step": PROMPTS}
    config = from_dict(
        groups | sizes | {"data": {"name": "lookup", "keys": 3}, "rollout": "sample", "adapter": {"name": "lora"}}
    )
    return replace(config, optimizer=replace(config.optimizer, lr=RATE), mode="run")


class Theirs:
    """The same step with transformers and PEFT."""

    def __init__(self, config: RunConfig, task: Task) -> None:
        assert config.model.checkpoint is not None
        model = transformers.AutoModelForCausalLM.from_pretrained(config.model.checkpoint, dtype=torch.float32)
        self.model = get_peft_model(model, LoraConfig(r=16, lora_alpha=32, target_modules="all-linear"))
        self.task, self.end = task, config.stop
        self.optimizer = torch.optim.AdamW([p for p in self.model.parameters() if p.requires_grad], lr=RATE)

    def step(self, number: int) -> float:
        rewards = []
        for i in range(PROMPTS):
            example = self.task.example(number * PROMPTS + i)
            ids = torch.as_tensor(example.prompt).repeat(GROUP, 1)
            with torch.no_grad():
                options = {"max_new_tokens": RESPONSE, "do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0}
                drawn = self.model.generate(
                    input_ids=ids, attention_mask=torch.ones_like(ids), eos_token_id=self.end, pad_token_id=2, **options
                )
            responses = drawn[:, ids.shape[1] :]
            ends = torch.isin(responses, torch.tensor(self.end)).int()
            kept = (ends.cumsum(1) - ends) == 0
            texts = [row[mask].numpy() for row, mask in zip(responses, kept, strict=True)]
            reward = torch.tensor([float(x or 0) for x in self.task.reward(example, texts)])
            rewards.append(reward.mean().item())
            if reward.std() == 0:
                continue
            advantage = (reward - reward.mean()) / (reward.std() + 1e-6)
            logits = self.model(input_ids=drawn[:, :-1], use_cache=False).logits[:, ids.shape[1] - 1 :]
            logprobs = logits.log_softmax(-1).gather(2, responses[..., None])[..., 0]
            (-(logprobs * advantage[:, None] * kept).sum() / kept.sum() / PROMPTS).backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return sum(rewards) / PROMPTS


def main(steps: int) -> None:
    config = configured()
    task = build_task(config)
    with MemoryMeter() as meter:
        ours = build_trainer(config, Monitor(meter, Progress(None)), task=task)
    theirs = Theirs(config, task)
    seconds: dict[str, list[float]] = {"LongStraw": [], "transformers": []}
    rewards: dict[str, list[float]] = {"LongStraw": [], "transformers": []}
    for step in range(steps):
        for side, take in (("LongStraw", lambda n: ours.step(n)["reward_mean"]), ("transformers", theirs.step)):
            begun = time.process_time()
            rewards[side].append(take(step))
            seconds[side].append(time.process_time() - begun)
    print("| side | CPU-seconds a step | of transformers | mean reward |\n|---|---:|---:|---:|")
    base = sum(seconds["transformers"])
    for side, each in seconds.items():
        print(f"| {side} | {sum(each) / steps:.1f} | {sum(each) / base:.2f} | {sum(rewards[side]) / steps:.2f} |")
    print(
        f"\n{steps} steps each: " + "; ".join(f"{side} {[round(x, 1) for x in each]}" for side, each in seconds.items())
    )


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 4)

"""Ask an exported model with transformers alone (docs/tutorial.md).

python examples/tutorial/ask.py runs/tutorial/export/hf "_/c+58:730;"
"""

from __future__ import annotations

import argparse
from typing import Any

from transformers import AutoModelForCausalLM, AutoTokenizer


def main() -> None:
    parser = argparse.ArgumentParser(description="Print the model's greedy answer to a prompt.")
    parser.add_argument("model", help="Hugging Face folder")
    parser.add_argument("prompt")
    options = parser.parse_args()
    tokenizer: Any = AutoTokenizer.from_pretrained(options.model)
    model: Any = AutoModelForCausalLM.from_pretrained(options.model)
    tokens = tokenizer(options.prompt, return_tensors="pt", return_token_type_ids=False)
    generated = model.generate(**tokens, max_new_tokens=128, do_sample=False)
    print(tokenizer.decode(generated[0, tokens["input_ids"].shape[1] :], skip_special_tokens=True))


if __name__ == "__main__":
    main()

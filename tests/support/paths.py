"""Where the committed checkpoints lie."""

import pathlib

FIXTURES = pathlib.Path(__file__).parent.parent / "fixtures"
Q4ABLE = "qwen3_5-bf16-q4able"  # its columns divide by 32
MODELS = ("qwen3_5-f32", "qwen3_5-bf16-sharded", "qwen3_next-f32", "qwen3_5-f16-nested", Q4ABLE)

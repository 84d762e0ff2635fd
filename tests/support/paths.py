"""Where the committed checkpoints lie."""

import pathlib

FIXTURES = pathlib.Path(__file__).parent.parent / "fixtures"
MODELS = ("qwen3_5-f32", "qwen3_5-bf16-sharded", "qwen3_next-f32", "qwen3_5-f16-nested")

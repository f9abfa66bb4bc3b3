"""Sizes of published models, by the name that ``meshcraft plan --model`` takes.

Llama 3: A. Grattafiori et al., The Llama 3 Herd of Models (arXiv 2407.21783), table 3. Mixtral: A. Jiang et al.,
Mixtral of Experts (arXiv 2401.04088), table 1. DeepSeek-V3: DeepSeek-AI, DeepSeek-V3 Technical Report (arXiv
2412.19437), section 4.2; its vocabulary is that of the model card.
"""

from course.sizes import Sizes

# The model that is planned if none is named, with the sizes of the chapters' larger examples.
BILLION = Sizes(16, 2048, 16, 32_000, 1024)
MODELS = {
    "llama-3-8b": Sizes(32, 4096, 32, 128_256, 8192, hidden=14_336, kv_heads=8, gated=True, rotary=True),
    "llama-3-70b": Sizes(80, 8192, 64, 128_256, 8192, hidden=28_672, kv_heads=8, gated=True, rotary=True),
    "llama-3-405b": Sizes(126, 16_384, 128, 128_256, 8192, hidden=53_248, kv_heads=8, gated=True, rotary=True),
    "mixtral-8x7b": Sizes(
        *(32, 4096, 32, 32_000, 32_768),
        hidden=14_336,
        kv_heads=8,
        gated=True,
        rotary=True,
        experts=8,
        experts_per_token=2,
    ),
    "deepseek-v3": Sizes(
        *(61, 7168, 128, 129_280, 4096),
        hidden=18_432,
        head_width=128,
        gated=True,
        rotary=True,
        experts=256,
        experts_per_token=8,
        shared_experts=1,
        expert_hidden=2048,
        dense_layers=3,
        query_rank=1536,
        kv_rank=512,
        rope_width=64,
    ),
}

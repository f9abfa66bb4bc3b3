"""Sizes of a decoder-only Transformer, its parameters leaf by leaf, and the FLOPs of a token.

The leaves of a dense model are those of ``course.model.transformer``. A mixture of experts has a router and
experts in place of most MLPs; latent attention has narrow projections before those of queries, keys and values.
"""

from __future__ import annotations

from dataclasses import dataclass

MAY_BE_ZERO = {
    "hidden": "four times the width",
    "parameters": "as many as the sizes give",
    "kv_heads": "as many as there are heads",
    "head_width": "the width over the heads",
    "min_size": "splitting all",
    "experts": "a dense MLP in every layer",
    "experts_per_token": "a dense MLP in every layer",
    "shared_experts": "none",
    "expert_hidden": "that of a dense MLP",
    "dense_layers": "none",
    "query_rank": "queries projected directly",
    "kv_rank": "keys and values projected directly",
    "rope_width": "no rotated features in addition to a head's own",
}


@dataclass(frozen=True)
class Sizes:
    """Sizes of a decoder-only Transformer.

    Attributes:
        layers, width, heads, vocab, seq: The usual sizes.
        hidden: Width inside the MLP; 0 means four times ``width``.
        parameters: Number of parameters, if known from elsewhere; 0 means that they are counted.
        kv_heads: Number of key/value heads, each shared by a group of query heads; 0 means ``heads``.
        head_width: Width of one head; 0 means ``width / heads``.
        gated: True if the MLP multiplies two matmuls of its input, as SwiGLU does.
        parallel: True if attention and MLP share one input and are added to the residual together.
        rotary: True if positions rotate queries and keys, so that no table of positions is learned.
        experts: Number of routed experts of a layer, in place of one MLP; 0 means that the model is dense.
        experts_per_token: Number of routed experts that compute each token.
        shared_experts: Number of experts that compute every token, in addition.
        expert_hidden: Width inside one expert; 0 means that of the MLP.
        dense_layers: Number of layers at the start of a mixture that have a dense MLP.
        query_rank, kv_rank: Widths to which latent attention projects before queries, and before keys and values;
            0 means none.
        rope_width: Rotated features of a head of latent attention, in addition to ``head_width``.
    """

    layers: int
    width: int
    heads: int
    vocab: int
    seq: int
    hidden: int = 0
    parameters: int = 0
    kv_heads: int = 0
    head_width: int = 0
    gated: bool = False
    parallel: bool = False
    rotary: bool = False
    experts: int = 0
    experts_per_token: int = 0
    shared_experts: int = 0
    expert_hidden: int = 0
    dense_layers: int = 0
    query_rank: int = 0
    kv_rank: int = 0
    rope_width: int = 0

    @property
    def inner(self) -> int:
        return self.hidden or 4 * self.width

    @property
    def queries(self) -> int:
        """Total width of the queries over all heads, without features that latent attention rotates separately."""
        return self.heads * (self.head_width or self.width // self.heads)

    @property
    def keys(self) -> int:
        """Total width of the keys over all heads; values have the same width."""
        return self.queries * (self.kv_heads or self.heads) // self.heads

    @property
    def rotated(self) -> int:
        """Total width over all heads of the features that latent attention rotates separately."""
        return self.heads * self.rope_width

    @property
    def mixtures(self) -> int:
        """Number of layers with experts."""
        return self.layers - self.dense_layers if self.experts else 0

    @property
    def expert_inner(self) -> int:
        """Width inside one expert."""
        return self.expert_hidden or self.inner

    @property
    def shared_inner(self) -> int:
        """Width inside all shared experts together."""
        return self.shared_experts * self.expert_inner

    @property
    def active_inner(self) -> int:
        """Width inside everything that a token passes through in place of one MLP."""
        return self.shared_inner + self.experts_per_token * self.expert_inner if self.experts else self.inner

    @property
    def count(self) -> int:
        """Total number of parameters."""
        return self.parameters or sum(leaf.elements for leaf in leaves(self).values())

    @property
    def active(self) -> int:
        """Number of parameters that one token uses, counting only the routed experts that it is sent to."""
        routed = sum(leaf.elements for leaf in leaves(self).values() if leaf.routed)
        return self.count - routed + (routed * self.experts_per_token // self.experts if self.experts else 0)


@dataclass(frozen=True)
class LeafSize:
    """A leaf of the parameters: its number of elements over all layers, and the axes that split it.

    Attributes:
        elements: Number of elements over all layers.
        layered: Whether it belongs to layers, which ``pipe`` splits.
        split: Whether ``tensor`` splits it.
        routed: Whether it belongs to routed experts, which ``expert`` splits.
    """

    elements: int
    layered: bool
    split: bool
    routed: bool = False


def leaves(sizes: Sizes) -> dict[str, LeafSize]:
    """Leaves of the parameters by name; those under ``layers`` cover all layers that have them."""
    d, m, v, n, q = sizes.width, sizes.inner, sizes.vocab, sizes.layers, sizes.queries
    dense = n - sizes.mixtures
    return {
        "embed/token": LeafSize(v * d, False, True),
        "embed/position": LeafSize(0 if sizes.rotary else sizes.seq * d, False, False),
        "layers/attention_norm/scale": LeafSize(n * d, True, False),
        **_attention(sizes),
        "layers/attention/out/kernel": LeafSize(n * q * d, True, True),
        "layers/mlp/norm/scale": LeafSize(n * d, True, False),
        "layers/mlp/up/kernel": LeafSize(dense * d * m * (1 + sizes.gated), True, True),
        "layers/mlp/up/bias": LeafSize(dense * m, True, True),
        "layers/mlp/down/kernel": LeafSize(dense * m * d, True, True),
        "layers/mlp/down/bias": LeafSize(dense * d, True, False),
        **_experts(sizes),
        "head/norm/scale": LeafSize(d, False, False),
        "head/out/kernel": LeafSize(d * v, False, True),
        "head/out/bias": LeafSize(v, False, True),
    }


def _attention(sizes: Sizes) -> dict[str, LeafSize]:
    """Projections of queries, keys and values: one, or those of latent attention (DeepSeek-V2, section 2.1)."""
    d, n, q, keys = sizes.width, sizes.layers, sizes.queries, sizes.kv_rank
    if not keys:
        return {"layers/attention/qkv/kernel": LeafSize(n * d * (q + 2 * sizes.keys), True, True)}
    ranks = sizes.query_rank + keys
    return {
        "layers/attention/down/kernel": LeafSize(n * d * (ranks + sizes.rope_width), True, False),
        "layers/attention/down/norm/scale": LeafSize(n * ranks, True, False),
        "layers/attention/queries/kernel": LeafSize(n * (sizes.query_rank or d) * (q + sizes.rotated), True, True),
        "layers/attention/keys_values/kernel": LeafSize(n * keys * 2 * q, True, True),
    }


def _experts(sizes: Sizes) -> dict[str, LeafSize]:
    """The router, shared experts and routed experts of a mixture; empty for a dense model."""
    if not sizes.experts:
        return {}
    n, d, shared = sizes.mixtures, sizes.width, sizes.shared_inner
    routed = n * d * sizes.experts * sizes.expert_inner
    return {
        "layers/experts/router/kernel": LeafSize(n * d * sizes.experts, True, False),
        "layers/experts/shared/up/kernel": LeafSize(n * d * shared * (1 + sizes.gated), True, True),
        "layers/experts/shared/down/kernel": LeafSize(n * d * shared, True, True),
        "layers/experts/routed/up/kernel": LeafSize(routed * (1 + sizes.gated), True, True, True),
        "layers/experts/routed/down/kernel": LeafSize(routed, True, True, True),
    }


def flops_per_token(sizes: Sizes) -> int:
    """``6 N + 12 L d s``: forward and backward, without a discount for causal masking (PaLM, appendix B).

    ``N`` is the number of parameters that a token uses, ``d`` the total width of the queries over all heads. Latent
    attention has additional features in the scores, but not in what they are multiplied by.
    """
    return 6 * sizes.active + 6 * sizes.layers * (2 * sizes.queries + sizes.rotated) * sizes.seq

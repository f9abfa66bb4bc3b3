"""Limits fall between the figures of the reference and the naive baseline, with a margin to each."""

import importlib
from math import inf

import pytest

from autograder.chapters.async_tensor_parallel import tasks as async_tp
from autograder.chapters.context_parallel import tasks as context
from autograder.chapters.context_parallel.step import STEP_TEMPORARIES
from autograder.chapters.data_parallel.tasks import EXPOSED
from autograder.chapters.expert_parallel import layer as moe_layer
from autograder.chapters.expert_parallel.routing import MOVING_TEMPORARIES
from autograder.chapters.looping_pipeline import tasks as looping
from autograder.chapters.pipeline import model as pipeline
from autograder.chapters.schedules import programs as schedules
from autograder.chapters.sequence_parallel import tasks as sequence
from autograder.chapters.tensor_parallel.alternatives import ALTERNATIVES
from autograder.chapters.tensor_parallel.tasks import SLOWER
from autograder.chapters.tp_transformer import step as tp_step
from autograder.chapters.tp_transformer.tasks import FASTER
from autograder.chapters.transformer_3d import layers as layers_3d
from autograder.chapters.transformer_3d import tasks as in_3d
from autograder.chapters.zero import tasks as zero
from autograder.contract.task import load, references
from autograder.release.reference_metrics import look

REFERENCE, NAIVE = "reference", "naive"
ASYNC = "async_tensor_parallel.async_tp_mlp"
# A limit as a multiple of the reference's or the naive baseline's figure, and the least ratios of the limit to the
# reference, and of the naive baseline to the limit.
LIMITS = [
    ("fsdp.fsdp_train_step", "seconds", 1.18, REFERENCE, 1.15, 1.15),
    ("fsdp.fsdp_train_step", "temporaries", 1.2, REFERENCE, 1.15, 1.15),
    ("fsdp.fsdp_loss", "temporaries", 1.25, REFERENCE, 1.15, 1.15),
    ("zero.zero1_step", "temporaries", zero.TEMPORARIES_1, REFERENCE, 1.15, 1.15),
    ("zero.zero2_step", "temporaries", zero.TEMPORARIES_2, REFERENCE, 1.15, 1.15),
    ("data_parallel.overlapped_gradients", "exposed", EXPOSED, NAIVE, 1.15, 1.15),
    ("data_parallel.train_step_dp", "temporaries", 1.5, REFERENCE, 1.15, 1.15),
    ("tensor_parallel.tp_mlp", "seconds", SLOWER, REFERENCE, 1.15, 1.15),
    ("tp_transformer.parallel_transformer_block", "seconds", FASTER, NAIVE, 1.15, 1.15),
    ("tp_transformer.tp_transformer_step", "exposed", tp_step.EXPOSED, NAIVE, 1.3, 1.15),
    ("tp_transformer.vocab_parallel_loss", "temporaries", 1, REFERENCE, 1, 4),
    ("sequence_parallel.sp_block", "flops", sequence.FLOPS, NAIVE, 1.04, 0),
    ("sequence_parallel.selective_recompute", "flops", sequence.FLOPS, NAIVE, 1.02, 0),
    ("sequence_parallel.ulysses_attention", "temporaries", 1, REFERENCE, 1, 4),
    ("context_parallel.ring_attention", "exposed", context.RING_EXPOSED, NAIVE, 1.15, 1.15),
    ("context_parallel.ring_attention", "temporaries", context.RING_TEMPORARIES, REFERENCE, 1.15, 1.15),
    ("context_parallel.zigzag_order", "seconds", context.FASTER, NAIVE, 1.15, 1.15),
    ("context_parallel.cp_transformer_step", "temporaries", STEP_TEMPORARIES, REFERENCE, 1.15, 1.15),
    *(
        (f"expert_parallel.{moving}", "temporaries", MOVING_TEMPORARIES, REFERENCE, 1.15, 1.15)
        for moving in ("dispatch", "combine")
    ),
    ("expert_parallel.moe_layer", "temporaries", moe_layer.LAYER_TEMPORARIES, REFERENCE, 1.15, 1.15),
    ("expert_parallel.moe_layer", "flops", 1.1, REFERENCE, 1.05, 1.15),
    ("expert_parallel.overlapped_moe", "exposed", moe_layer.OVERLAPPED_EXPOSED, NAIVE, 1.15, 1.15),
    ("pipeline.pipeline_loss", "flops", pipeline.SPREAD, NAIVE, 1.15, 1.15),
    ("looping_pipeline.looping_train_step", "spent", looping.EXPOSED, NAIVE, 1.15, 1.15),
    ("looping_pipeline.looping_train_step", "temporaries", looping.TEMPORARIES, REFERENCE, 1.15, 1.15),
    ("looping_pipeline.execute_looping_pipeline", "seconds", 1, REFERENCE, 1, 1.15),  # draining is a second bubble
    ("schedules.execute_schedule", "temporaries", schedules.TEMPORARIES, REFERENCE, 1.15, 1.15),
    ("schedules.execute_schedule", "seconds", 1, REFERENCE, 1, 1.15),  # choosing among all passes is another bubble
    ("single_device.mixed_precision_loss", "temporaries", 0.7, NAIVE, 1.15, 1.15),
    ("single_device.accumulate_gradients", "temporaries", 1.15, REFERENCE, 1.15, 1.15),
    ("single_device.remat_layers", "temporaries", 0.35, NAIVE, 1.15, 1.15),
    ("single_device.remat_layers", "flops", 4 / 3, NAIVE, 1, 0),
    ("single_device.chunked_attention", "temporaries", 0.4, NAIVE, 1.15, 1.15),
    ("single_device.chunked_attention", "flops", 1.35, NAIVE, 1.15, 0),
    ("transformer_3d.layers_3d", "temporaries", layers_3d.TEMPORARIES, REFERENCE, 1.15, 1.15),
    ("transformer_3d.forward_3d", "temporaries", in_3d.TEMPORARIES, REFERENCE, 1.15, 1.15),
    ("transformer_3d.forward_3d", "spent", in_3d.EXPOSED, NAIVE, 1.15, 1.15),
    ("async_tensor_parallel.ring_gather_matmul", "seconds", async_tp.TIME["gather"], NAIVE, 1.08, 1.15),
    ("async_tensor_parallel.ring_gather_matmul", "temporaries", async_tp.TEMPORARIES, NAIVE, 1.15, 1.15),
    ("async_tensor_parallel.matmul_ring_scatter", "seconds", async_tp.TIME["scatter"], NAIVE, 1.08, 1.15),
    ("async_tensor_parallel.matmul_ring_scatter", "temporaries", async_tp.TEMPORARIES, NAIVE, 1.15, 1.15),
    ("async_tensor_parallel.bidirectional_gather_matmul", "seconds", async_tp.BOTH_WAYS, NAIVE, 1.15, 1.1),
    ("async_tensor_parallel.bidirectional_matmul_scatter", "seconds", async_tp.BOTH_WAYS, NAIVE, 1.15, 1.1),
    (ASYNC, "exposed", async_tp.EXPOSED, NAIVE, 1.15, 1.15),
    (ASYNC, "seconds", async_tp.MLP_TIME, NAIVE, 1.15, 1),
    (ASYNC, "temporaries", async_tp.MLP_TEMPORARIES, NAIVE, 1.15, 0),
]


@pytest.mark.parametrize(("name", "figure", "factor", "of", "room", "margin"), LIMITS)
def test_a_limit_lies_between_reference_and_naive_baseline_with_a_margin_to_each(
    name, figure, factor, of, room, margin
):
    chapter, task = name.split(".")
    if not references(chapter):
        pytest.skip("not measured with this version of jax")
    figures = references(chapter)[task][figure]
    limit = factor * figures[of]
    assert room * figures["reference"] <= limit
    assert margin * limit <= figures["naive"]


# Figures of other answers at scale, as a multiple of the reference's or the naive baseline's: the least and the most.
OTHER_ANSWERS = [
    (
        "context_parallel.ring_attention",
        "saves_every_block",
        "temporaries",
        REFERENCE,
        1.1 * context.RING_TEMPORARIES,
        inf,
    ),
    ("context_parallel.ring_attention", "skips_no_pair_of_chunks", "seconds", REFERENCE, 1.15 * context.RING_TIME, inf),
    ("context_parallel.ring_attention", "sends_sums_after_adding", "exposed", NAIVE, 1.15 * context.RING_EXPOSED, inf),
    ("fsdp.fsdp_train_step", "prefetches_forward_only", "seconds", REFERENCE, 1.04 * 1.18, inf),
    ("fsdp.fsdp_train_step", "with_delay", "seconds", REFERENCE, 1, 0.93 * 1.18),
    ("fsdp.fsdp_loss", "by_number", "temporaries", REFERENCE, 1, 0.93 * 1.25),
    ("zero.zero1_step", "by_flat_gradients", "temporaries", REFERENCE, 1, 0.93 * zero.TEMPORARIES_1),
    ("zero.zero2_step", "adds_into_a_new_stack", "temporaries", REFERENCE, 1.15 * zero.TEMPORARIES_2, inf),
    (
        "looping_pipeline.looping_train_step",
        "computes_both_repeats_to_choose",
        "flops",
        REFERENCE,
        1.15 * looping.FLOPS,
        inf,
    ),
    *(
        ("schedules.execute_schedule", name, "temporaries", REFERENCE, 0, 0.93 * schedules.TEMPORARIES)
        for name in ("small_results", "by_conditions")
    ),
    ("expert_parallel.moe_layer", "by_a_table", "temporaries", REFERENCE, 1, 0.93 * moe_layer.LAYER_TEMPORARIES),
    ("expert_parallel.overlapped_moe", "one_chunk_ahead", "exposed", NAIVE, 0, 0.93 * moe_layer.OVERLAPPED_EXPOSED),
    ("single_device.remat_layers", "keeps_every_product", "temporaries", NAIVE, 1.15 * 0.35, inf),
    ("single_device.remat_layers", "with_products_without_batch_dims", "temporaries", NAIVE, 0, 0.35 / 1.15),
    ("single_device.remat_layers", "checkpoints_twice", "flops", NAIVE, 4 / 3, inf),
    ("single_device.chunked_attention", "keeps_every_chunk", "temporaries", NAIVE, 1.15 * 0.4, inf),
    (ASYNC, "hides_the_forward_pass_alone", "exposed", NAIVE, 1.15 * async_tp.EXPOSED, inf),
    (ASYNC, "leaves_the_derivative_to_jax", "exposed", NAIVE, 0, 0.1),
    (ASYNC, "keeps_every_product", "seconds", NAIVE, 0, 0.93),
    (ASYNC, "keeps_every_product", "temporaries", NAIVE, 1.15 * async_tp.MLP_TEMPORARIES, inf),
    (ASYNC, "leaves_the_derivative_to_jax", "seconds", NAIVE, 1.15, inf),
    ("tp_transformer.parallel_transformer_block", *("with_attention_recomputed", "seconds", NAIVE, 0, 0.93 * FASTER)),
    ("tp_transformer.tp_transformer_step", "with_layers_that_recompute", "exposed", NAIVE, 0, 0.93 * tp_step.EXPOSED),
    ("sequence_parallel.sp_block", "computes_a_product_again", "flops", NAIVE, 1.04 * sequence.FLOPS, inf),
    (
        "sequence_parallel.selective_recompute",
        "recomputes_all_of_the_layer",
        "flops",
        NAIVE,
        1.15 * sequence.FLOPS,
        inf,
    ),
    *(("tensor_parallel.tp_mlp", f.__name__, "seconds", REFERENCE, 0, 0.95 * SLOWER) for f in ALTERNATIVES["tp_mlp"]),
]


@pytest.mark.parametrize(("name", "function", "figure", "of", "least", "most"), OTHER_ANSWERS)
def test_a_limit_tells_right_answers_from_wrong_ones_that_are_better_than_the_naive_baseline(
    name, function, figure, of, least, most
):
    chapter, task = name.split(".")
    mutants = importlib.import_module(f"autograder.chapters.{chapter}.mutants").MUTANTS
    alternatives = importlib.import_module(f"autograder.chapters.{chapter}.alternatives").ALTERNATIVES
    answers = [*(mutant.function for mutant in mutants if mutant.task == task), *alternatives[task]]
    (answer,) = [answer for answer in answers if answer.__name__ == function]
    assert least <= look(load(chapter).task(task), answer)[figure] / references(chapter)[task][figure][of] < most

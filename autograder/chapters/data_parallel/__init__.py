"""The contract of ``data_parallel``: one model, many batches."""

from autograder.chapters.data_parallel import keys, overlap, step, sync
from autograder.contract import Contract, Task

READ = {
    "values": ("data_parallel", "Mistakes that cost people days"),
    "communication": ("data_parallel", "Randomness"),
    "gradients": ("data_parallel", "Sums, means and what varies"),
    "gradient norm": ("data_parallel", "Sums, means and what varies"),
    "all-reduces": ("data_parallel", "Which axes a leaf needs"),
    "all-reduce bytes": ("data_parallel", "Accumulate first, reduce once"),
    "other collectives": ("data_parallel", "What an all-reduce costs"),
    "live temporaries": ("data_parallel", "Accumulate first, reduce once"),
    "exposed communication": ("data_parallel", "Reduce while the backward pass goes on"),
    "predicted time": ("data_parallel", "Reduce while the backward pass goes on"),
}

CONTRACT = Contract(
    "data_parallel",
    (
        Task(
            name="fold_key_over_axes",
            kind="local",
            signature="(key, axis_names)",
            points=1,
            cases=keys.CASES,
            unseen=keys.unseen,
            wrap=keys.wrap,
            draw=keys.draw,
            oracle=keys.oracle,
            facts=keys.key_facts,
        ),
        Task(
            name="sync_gradients",
            kind="local",
            signature="(gradients, specs, axis_names)",
            points=2,
            cases=sync.CASES,
            unseen=sync.unseen,
            wrap=sync.wrap,
            draw=sync.draw,
            oracle=sync.oracle,
            facts=sync.sync_facts,
        ),
        Task(
            name="train_step_dp",
            kind="local",
            signature="(params, batch, model, axis_name, num_microbatches, learning_rate)",
            points=3,
            cases=step.CASES,
            unseen=step.unseen,
            wrap=step.wrap,
            draw=step.draw,
            oracle=step.oracle,
            facts=step.step_facts,
            analysed=step.ANALYSED,
            naive="takes_all_rows_at_once",
        ),
        Task(
            name="overlapped_gradients",
            kind="local",
            signature="(params, batch, model, axis_name, num_microbatches)",
            points=4,
            cases=overlap.CASES,
            unseen=overlap.unseen,
            wrap=overlap.wrap,
            draw=overlap.draw,
            oracle=overlap.oracle,
            facts=overlap.overlap_facts,
            analysed=overlap.ANALYSED,
            naive="reduces_after_the_backward_pass",
            slow="reduces_after_the_backward_pass",
            machine="8xA5000",
        ),
    ),
    question_points=2,
    read=READ,
)

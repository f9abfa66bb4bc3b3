"""The contract of ``data_parallel``: one model, many batches."""

from autograder.chapters.data_parallel import keys, overlap, step, sync
from autograder.contract.task import Contract, Task
from autograder.contract.wrapping import wrappings

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
    "compiled exposed": ("profiling/data_parallel", "What the compiler makes of it"),
    "predicted time": ("data_parallel", "Reduce while the backward pass goes on"),
}

WRAPPINGS = wrappings("data_parallel")
CONTRACT = Contract(
    "data_parallel",
    (
        Task(
            wrapping=WRAPPINGS["fold_key_over_axes"],
            kind="local",
            points=1,
            cases=keys.CASES,
            unseen=keys.unseen,
            draw=keys.draw,
            oracle=keys.oracle,
            facts=keys.key_facts,
        ),
        Task(
            wrapping=WRAPPINGS["sync_gradients"],
            kind="local",
            points=2,
            cases=sync.CASES,
            unseen=sync.unseen,
            draw=sync.draw,
            oracle=sync.oracle,
            facts=sync.sync_facts,
        ),
        Task(
            wrapping=WRAPPINGS["train_step_dp"],
            kind="local",
            points=3,
            cases=step.CASES,
            unseen=step.unseen,
            draw=step.draw,
            oracle=step.oracle,
            facts=step.step_facts,
            analysed=step.ANALYSED,
            stretches=({"rows": 8192}, {"width": 1024}, {"hidden": 4096}),
            naive="takes_all_rows_at_once",
        ),
        Task(
            wrapping=WRAPPINGS["overlapped_gradients"],
            kind="local",
            points=4,
            cases=overlap.CASES,
            unseen=overlap.unseen,
            draw=overlap.draw,
            oracle=overlap.oracle,
            facts=overlap.overlap_facts,
            analysed=overlap.ANALYSED,
            stretches=({"rows": 8192}, {"width": 2048}, {"hidden": 8192}),
            naive="reduces_after_the_backward_pass",
            slow="reduces_after_the_backward_pass",
            machine="8xA5000",
            compiled_exposed=overlap.EXPOSED,
        ),
    ),
    question_points=2,
    read=READ,
)

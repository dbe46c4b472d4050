"""The worked example of docs/scheduling.md is what the scheduler does."""

from __future__ import annotations

from pathlib import Path

DOC = Path(__file__).parents[2] / "docs" / "scheduling.md"


def rows_of_the_page() -> list[list[str]]:
    text = DOC.read_text(encoding="utf-8")
    lines = [line for line in text[text.index("## An example") :].splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def test_the_worked_example(run, request_of):
    b = list(range(20, 30))
    r = run(num_blocks=6, block_size=4, max_num_batched_tokens=10)
    r.add(request_of("A", 6, 6), request_of("B", b, 6), request_of("C", [*b[:8], 90], 2))
    rows = []
    while r.scheduler.has_unfinished():
        plan = r.step()
        given = {new.sequence_id: new.block_ids[0] for new in plan.new_sequences}
        given |= {cont.sequence_id: cont.new_block_ids[0] for cont in plan.continuing if cont.new_block_ids}
        rows.append(
            [
                str(len(rows) + 1),
                *(str(plan.num_scheduled_tokens.get(name, "")) for name in "ABC"),
                "; ".join(" ".join(map(str, [name, *given[name]])) for name in sorted(given)),
                " ".join(plan.finished_sequence_ids + plan.preempted_sequence_ids),
                str(r.scheduler.kv.pool.num_free),
            ]
        )
    assert rows == rows_of_the_page()
    assert [r.last[name].num_preemptions for name in "ABC"] == [0, 1, 0]

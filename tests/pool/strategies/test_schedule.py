"""1F1B: what each stage walks, in which order."""

from hypothesis import given
from hypothesis import strategies as st

from potluck.pool.strategies.schedule import one_forward_one_backward


def in_letters(stage: int, stages: int, micro_batches: int) -> str:
    walks = one_forward_one_backward(stage, stages, micro_batches)
    return " ".join(f"{direction[0].upper()}{m}" for direction, m in walks)


def test_three_stages_by_hand() -> None:
    assert in_letters(0, 3, 4) == "F0 F1 F2 B0 F3 B1 B2 B3"
    assert in_letters(1, 3, 4) == "F0 F1 B0 F2 B1 F3 B2 B3"
    assert in_letters(2, 3, 4) == "F0 B0 F1 B1 F2 B2 F3 B3"
    assert [in_letters(stage, 3, 1) for stage in range(3)] == ["F0 B0"] * 3
    assert in_letters(0, 3, 2) == "F0 F1 B0 B1"
    assert in_letters(0, 1, 2) == "F0 B0 F1 B1"


@given(st.integers(1, 8).flatmap(lambda S: st.tuples(st.integers(0, S - 1), st.just(S))), st.integers(1, 20))
def test_every_walk_once_in_order_and_few_in_flight(place: tuple[int, int], micro_batches: int) -> None:
    stage, stages = place
    walks = [*one_forward_one_backward(stage, stages, micro_batches)]
    for direction in ("forward", "backward"):
        assert [m for d, m in walks if d == direction] == [*range(micro_batches)]
    in_flight = 0
    for direction, _ in walks:
        in_flight += 1 if direction == "forward" else -1
        assert 0 <= in_flight <= stages - stage


@given(st.integers(1, 6), st.integers(1, 12))
def test_stages_that_wait_for_each_other_come_to_the_end(stages: int, micro_batches: int) -> None:
    left = [[*one_forward_one_backward(stage, stages, micro_batches)] for stage in range(stages)]
    done: set[tuple[int, str, int]] = set()

    def possible(stage: int) -> bool:
        direction, m = left[stage][0]
        if direction == "forward":
            return stage == 0 or (stage - 1, direction, m) in done
        return stage == stages - 1 or (stage + 1, direction, m) in done

    while moving := [stage for stage in range(stages) if left[stage] and possible(stage)]:
        done |= {(stage, *left[stage].pop(0)) for stage in moving}
    assert not any(left)

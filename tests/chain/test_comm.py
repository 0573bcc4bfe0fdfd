"""Messages over real Gloo, ranks as threads."""

import time
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from potluck.chain.comm import Comm
from potluck.errors import DeviceLost
from worlds import run_world


def own(comm: Comm, *shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(comm.rank), dtype=torch.float64).to(dtype)


def test_all_reduce_sums_and_leaves_its_input_alone() -> None:
    def body(comm: Comm) -> tuple[Tensor, Tensor]:
        x = own(comm, 3, 4)
        before = x.clone()
        message = comm.all_reduce(x)
        answer = message.wait()
        assert torch.equal(x, before)
        assert answer.data_ptr() != x.data_ptr()
        assert message.wait() is answer
        return before, answer

    inputs, answers = zip(*run_world(3, body), strict=True)
    expected = torch.stack(inputs).sum(0)
    for answer in answers:
        assert torch.allclose(answer, expected, atol=1e-12)
        assert torch.equal(answer, answers[0])


def test_the_input_of_a_message_under_way_may_have_any_strides() -> None:
    def body(comm: Comm) -> None:
        x = own(comm, 4, 3).T
        assert torch.allclose(comm.all_reduce(x).wait(), sum_of(2, 4, 3).T)
        assert torch.equal(comm.all_gather(x).wait()[comm.rank], x)

    def sum_of(world_size: int, *shape: int) -> Tensor:
        draws = [torch.Generator().manual_seed(rank) for rank in range(world_size)]
        return torch.stack([torch.randn(*shape, generator=draw, dtype=torch.float64) for draw in draws]).sum(0)

    run_world(2, body)


def test_messages_in_flight_together_do_not_mix() -> None:
    def body(comm: Comm) -> list[Tensor]:
        messages = [comm.all_reduce(torch.full((1000,), float(10**i * (comm.rank + 1)))) for i in range(5)]
        return [message.wait() for message in reversed(messages)]

    for answers in run_world(3, body):
        for i, answer in enumerate(reversed(answers)):
            assert torch.equal(answer, torch.full((1000,), 6.0 * 10**i))


def test_the_wire_rounds_and_exact_messages_do_not() -> None:
    def body(comm: Comm) -> int:
        x = torch.tensor([1.0 + 2**-12, 3.0])
        rounded = comm.all_reduce(x).wait()
        assert rounded.dtype == torch.bfloat16
        assert torch.equal(rounded, torch.tensor([2.0, 6.0], dtype=torch.bfloat16))
        sent = comm.clocks.bytes_sent
        exact = comm.all_reduce(x, exact=True).wait()
        assert exact.dtype == torch.float32
        assert torch.equal(exact, 2 * x)
        assert comm.all_gather(x).wait().dtype == torch.float32
        assert torch.equal(x, torch.tensor([1.0 + 2**-12, 3.0]))
        return sent

    assert run_world(2, body, wire=torch.bfloat16) == [4, 4]


@pytest.mark.parametrize("source", [0, 1, 2])
def test_broadcast_gives_everybody_what_the_source_has(source: int) -> None:
    def body(comm: Comm) -> Tensor:
        return comm.broadcast(own(comm, 5), source).wait()

    answers = run_world(3, body)
    assert all(torch.equal(answer, answers[source]) for answer in answers)
    assert torch.equal(answers[0], torch.randn(5, generator=torch.Generator().manual_seed(source), dtype=torch.float64))


def test_all_gather_keeps_the_order_of_ranks() -> None:
    def body(comm: Comm) -> Tensor:
        return comm.all_gather(torch.full((2, 2), comm.rank, dtype=torch.long)).wait()

    for answer in run_world(4, body):
        assert torch.equal(answer, torch.arange(4)[:, None, None].expand(4, 2, 2))


def test_send_and_receive() -> None:
    def body(comm: Comm) -> None:
        if comm.rank == 1:
            comm.send(own(comm, 2, 3).T, 0)
        elif comm.rank == 0:
            got = comm.receive(torch.zeros(3, 2, dtype=torch.float64), 1)
            expected = torch.randn(2, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64).T
            assert torch.equal(got, expected)

    run_world(3, body)


def test_a_message_between_two_leaves_before_anybody_asks_for_it() -> None:
    def body(comm: Comm) -> None:
        if comm.rank == 0:
            messages = [comm.start_send(torch.full((1 << 18,), float(i)), 1, 3) for i in range(3)]
            comm.all_reduce(torch.ones(1)).wait()  # would never come if sending waited for the receiver
            for message in messages:
                message.wait()
        else:
            comm.all_reduce(torch.ones(1)).wait()
            asked = [comm.start_receive(torch.empty(1 << 18), 0, 3) for _ in range(3)]
            for i, message in reversed([*enumerate(asked)]):
                assert torch.equal(message.wait(), torch.full((1 << 18,), float(i)))

    run_world(2, body)


def test_messages_of_different_tags_do_not_mix() -> None:
    def body(comm: Comm) -> None:
        other = 1 - comm.rank
        sent = [comm.start_send(torch.full((4,), 10.0 * tag + i), other, tag) for tag in (1, 2) for i in range(2)]
        for tag in (2, 1):
            for i in range(2):
                x = comm.start_receive(torch.empty(4), other, tag).wait()
                assert torch.equal(x, torch.full((4,), 10.0 * tag + i))
        for message in sent:
            message.wait()

    run_world(2, body)


def test_between_two_activations_travel_in_the_wires_dtype_and_whole_numbers_as_they_are() -> None:
    def body(comm: Comm) -> int:
        x, ids = torch.tensor([1.0 + 2**-12, 3.0]), torch.tensor([2**40 + 1, 7])
        assert (comm.travels(x.dtype), comm.travels(ids.dtype)) == (torch.bfloat16, torch.int64)
        if comm.rank == 0:
            for message in [
                comm.start_send(x, 1, 1),
                comm.start_send(ids, 1, 2),
                comm.start_send(x, 1, 3, exact=True),
                comm.start_send(x[:0], 1, 4),
            ]:
                message.wait()
            return comm.clocks.bytes_sent
        rounded = comm.start_receive(torch.empty(2, dtype=torch.bfloat16), 0, 1).wait()
        assert torch.equal(rounded, torch.tensor([1.0, 3.0], dtype=torch.bfloat16))
        assert torch.equal(comm.start_receive(torch.empty_like(ids), 0, 2).wait(), ids)
        assert torch.equal(comm.start_receive(torch.empty_like(x), 0, 3).wait(), x)
        assert comm.start_receive(torch.empty(0), 0, 4).wait().numel() == 0
        return comm.clocks.bytes_sent

    assert run_world(2, body, wire=torch.bfloat16) == [4 + 16 + 8, 0]


def test_waits_between_two_are_counted_apart() -> None:
    def body(comm: Comm) -> tuple[list[float], float]:
        if comm.rank == 0:
            time.sleep(0.2)
            comm.start_send(torch.ones(3), 1, 1).wait()
        else:
            comm.start_receive(torch.empty(3), 0, 1).wait()
        waited = [*comm.clocks.blocked_s], comm.clocks.awaited_s
        comm.clocks.restart()
        assert comm.clocks.awaited_s == 0
        return waited

    (of_first, first_s), (of_second, second_s) = run_world(2, body)
    assert of_first == of_second == []
    assert second_s > 0.15
    assert first_s < second_s


def test_whose_content_needs_no_other_dtype_or_strides_is_not_copied() -> None:
    heard: list[int] = []

    def body(comm: Comm) -> int:
        x = torch.randn(4, 3).requires_grad_()
        if comm.rank == 0:
            comm.start_send(x, 1, 1).wait()
        else:
            comm.start_receive(torch.empty(4, 3), 0, 1).wait()
        return x.data_ptr()

    pointers = run_world(2, body, listener=lambda rank: lambda kind, content: heard.append(content.data_ptr()))
    assert heard == pointers[:1]


def test_alone_every_message_is_its_own_answer() -> None:
    comm, x = Comm(), torch.randn(3)
    assert comm.all_reduce(x).wait() is x
    assert torch.equal(comm.all_gather(x).wait(), x[None])
    assert comm.broadcast(x, 0).wait() is x
    assert (comm.rank, comm.world_size, comm.clocks.blocked_s, comm.clocks.bytes_sent) == (0, 1, [], 0)


def test_every_rank_waits_equally_often_whatever_it_sends() -> None:
    def body(comm: Comm) -> list[float]:
        comm.all_reduce(own(comm, 4)).wait()
        comm.broadcast(own(comm, 4), 1).wait()
        comm.all_gather(own(comm, 4)).wait()
        comm.all_reduce(own(comm, 0)).wait()
        message = comm.all_reduce(own(comm, 4))
        message.wait()
        message.wait()
        return comm.clocks.blocked_s

    blocked = run_world(3, body)
    assert [len(waits) for waits in blocked] == [4, 4, 4]
    assert all(wait >= 0 for waits in blocked for wait in waits)


def test_the_clock_of_who_waits_runs_and_of_who_is_late_does_not() -> None:
    def body(comm: Comm) -> float:
        comm.all_reduce(torch.ones(1)).wait()
        if comm.rank == 1:
            time.sleep(0.3)
        comm.all_reduce(torch.ones(1)).wait()
        return comm.clocks.blocked_s[1]

    early, late = run_world(2, body)
    assert early > 0.25
    assert late < early - 0.1


def test_the_listener_hears_each_message_once_and_before_it_changes() -> None:
    heard: list[list[tuple[str, Tensor]]] = [[], []]

    def body(comm: Comm) -> None:
        comm.all_reduce(own(comm, 3)).wait()
        comm.broadcast(own(comm, 3), 1).wait()

    def listener(rank: int) -> Callable[[str, Tensor], None]:
        return lambda kind, content: heard[rank].append((kind, content.clone()))

    run_world(2, body, listener=listener)
    assert [kind for kind, _ in heard[0]] == ["all_reduce"]
    assert [kind for kind, _ in heard[1]] == ["all_reduce", "broadcast"]
    for rank in range(2):
        sent = torch.randn(3, generator=torch.Generator().manual_seed(rank), dtype=torch.float64)
        assert torch.equal(heard[rank][0][1], sent)


@pytest.mark.timing
@pytest.mark.parametrize("send", ["all_reduce", "broadcast", "all_gather", "between two"])
def test_a_peer_that_ends_is_noticed_by_all_others(send: str) -> None:
    def exchange(comm: Comm) -> None:
        if send == "all_reduce":
            comm.all_reduce(torch.ones(4)).wait()
        elif send == "all_gather":
            comm.all_gather(torch.ones(4)).wait()
        elif send == "between two":
            sent = [comm.start_send(torch.ones(4), other, 1) for other in range(3) if other != comm.rank]
            asked = [comm.start_receive(torch.empty(4), other, 1) for other in range(3) if other != comm.rank]
            for message in [*sent, *asked]:
                message.wait()
        else:
            comm.broadcast(torch.ones(4), 2).wait()

    def body(comm: Comm) -> float:
        exchange(comm)
        if comm.rank == 2:
            return 0.0
        start = time.monotonic()
        with pytest.raises(DeviceLost, match="Another device ended"):
            exchange(comm)
        return time.monotonic() - start

    assert max(run_world(3, body, ranks_end=True)) < 2

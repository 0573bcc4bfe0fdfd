import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from potluck.pool.halves import deal, decode_layouts, encode_layouts
from potluck.texts.batch import Batch, Layout


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    lengths = draw(st.lists(st.integers(1, 9), min_size=1, max_size=7))
    positions = tuple(tuple(sorted(draw(st.sets(st.integers(0, length - 1))))) for length in lengths)
    return Layout(tuple(lengths), positions)


def told_apart(layout: Layout) -> Batch:
    """Every token an id of its own, and its target the id's opposite."""
    B, S = len(layout.lengths), max(layout.lengths)
    ids_BS = torch.zeros(B, S, dtype=torch.long)
    targets = []
    for row, (length, positions) in enumerate(zip(layout.lengths, layout.positions, strict=True)):
        ids_BS[row, :length] = torch.arange(1, length + 1) + 100 * row
        targets += [-int(ids_BS[row, position]) for position in positions]
    return Batch(ids_BS, torch.tensor(targets, dtype=torch.long), layout)


@given(st.lists(layouts(), max_size=4))
def test_layouts_survive_their_message(several: list[Layout]) -> None:
    encoded = encode_layouts(several)
    assert encoded.dtype == torch.long
    assert decode_layouts(encoded) == several


@given(layouts(), st.sampled_from([1, 2]))
@settings(deadline=None)
def test_every_row_and_target_is_in_exactly_one_half(layout: Layout, halves: int) -> None:
    batch = told_apart(layout)
    dealt = deal(layout, batch, halves)
    B = len(layout.lengths)
    assert len(dealt) == min(halves, B)
    assert sum(half.shape_BS[0] for half in dealt) == B
    rows, targets = [], []
    for half in dealt:
        assert half.ids_BS is not None
        assert half.targets_N is not None
        assert tuple(half.ids_BS.shape) == half.shape_BS
        rows += [row[row > 0].tolist() for row in half.ids_BS]
        assert half.shape_BS[1] == max(int((row > 0).sum()) for row in half.ids_BS), "no more padding than needed"
        # A half's positions point at the tokens whose targets it brings.
        assert torch.equal(half.ids_BS.flatten()[half.positions_N], -half.targets_N)
        targets += half.targets_N.tolist()
    assert sorted(rows) == sorted(row[row > 0].tolist() for row in batch.ids_BS)
    assert sorted(targets) == sorted(batch.targets_N.tolist())
    sizes = [half.shape_BS[0] for half in dealt]
    assert max(sizes) - min(sizes) <= 1


@given(layouts(), st.sampled_from([1, 2]))
@settings(deadline=None)
def test_devices_without_the_data_deal_alike(layout: Layout, halves: int) -> None:
    batch = told_apart(layout)
    for owned, unseen in zip(deal(layout, batch, halves), deal(layout, None, halves), strict=True):
        assert unseen.shape_BS == owned.shape_BS
        assert torch.equal(unseen.positions_N, owned.positions_N)
        assert unseen.ids_BS is None
        assert unseen.targets_N is None


def test_rows_sorted_by_length_give_halves_of_about_equal_length() -> None:
    first, second = deal(Layout((2, 3, 8, 9), ((), (), (), ())), None, 2)
    assert (first.shape_BS, second.shape_BS) == ((2, 8), (2, 9))

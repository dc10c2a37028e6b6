"""What came over each link, from what the ranks say that they read."""

from hypothesis import given
from hypothesis import strategies as st

from rltrain.routing.links import FetchedObjects, bytes_by_link

NODES = st.sampled_from(["10.0.0.1", "10.0.0.2", "10.0.0.3"])
SIZES = {f"object {n}": (f"10.0.0.{n % 3 + 1}", 10**n) for n in range(6)}
"""Objects of different sizes, so that every sum tells which ones are in it."""
RANKS = st.lists(st.tuples(NODES, st.sets(st.sampled_from(sorted(SIZES)))), max_size=8)


@given(RANKS)
def test_an_object_counts_once_on_each_node_that_reads_it(
    ranks: list[tuple[str, set[str]]],
) -> None:
    fetched = [FetchedObjects(node, {name: SIZES[name] for name in names}) for node, names in ranks]
    links = bytes_by_link(fetched)
    for to in {node for node, _ in ranks}:
        read = set().union(*(names for node, names in ranks if node == to))
        for source in {SIZES[name][0] for name in read}:
            expected = sum(SIZES[name][1] for name in read if SIZES[name][0] == source)
            assert links.pop((source, to)) == expected
    assert not links


def test_nothing_came_where_no_rank_read_anything() -> None:
    assert bytes_by_link([]) == bytes_by_link([FetchedObjects("10.0.0.1")]) == {}

"""A plan says how much host memory JAX pins for offloaded state, and how to make it pin no more than needed."""

from zerojax.planning.absent_program import pinning_note


def test_twice_the_need_may_be_pinned():
    (note,) = pinning_note(17_730_000_000)
    assert note.startswith("A host pins up to 35.5 GB for 17.7 GB")
    assert "XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB=20 before JAX starts" in note


def test_nothing_is_said_of_nothing():
    assert pinning_note(0) == ()

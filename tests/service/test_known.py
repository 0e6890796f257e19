"""What counts as stored without being asked again."""

import numpy as np

from hybridkv.clock import ManualClock
from hybridkv.service.known import KnownObjects


def digests(*numbers):
    return b"".join(bytes((number,)) * 16 for number in numbers)


def known(clock=None, capacity=4):
    return KnownObjects(16, capacity=capacity, age_s=60.0, clock=clock or ManualClock())


def test_objects_are_known_by_group_and_digest_until_they_are_forgotten():
    objects = known()
    objects.note(0, digests(1, 2))
    np.testing.assert_array_equal(objects.unknown(0, digests(1, 2, 3)), [False, False, True])
    assert objects.unknown(1, digests(1)).all()
    assert objects.unknown(0, b"").shape == (0,)
    objects.forget(0, digests(1, 3))
    np.testing.assert_array_equal(objects.unknown(0, digests(1, 2)), [True, False])
    objects.clear()
    assert objects.unknown(0, digests(1, 2)).all()


def test_the_longest_known_is_forgotten_first():
    objects = known()
    objects.note(0, digests(1, 2, 3, 4))
    objects.note(0, digests(1))
    objects.note(0, digests(5, 6))
    np.testing.assert_array_equal(
        objects.unknown(0, digests(1, 2, 3, 4, 5, 6)), [False, True, True, False, False, False]
    )
    none = known(capacity=0)
    none.note(0, digests(1))
    assert none.unknown(0, digests(1)).all()


def test_what_was_seen_long_ago_is_asked_again():
    clock = ManualClock()
    objects = known(clock)
    objects.note(0, digests(1))
    clock.sleep(59)
    assert not objects.unknown(0, digests(1)).any()
    clock.sleep(1)
    assert objects.unknown(0, digests(1)).all()

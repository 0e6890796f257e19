"""What counts as stored without being asked again."""

import numpy as np
import pytest

from hybridkv.clock import ManualClock
from hybridkv.service.known import KnownObjects


def digests(*numbers):
    return b"".join(bytes((number,)) * 16 for number in numbers)


def known(clock=None, capacity=8, age_s=60.0):
    return KnownObjects(16, num_groups=2, capacity=capacity, age_s=age_s, clock=clock or ManualClock())


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


def test_the_longest_known_are_forgotten_first_and_their_number_is_bounded():
    objects = known(capacity=8)
    for number in range(50):
        objects.note(number % 2, digests(number))
        assert len(objects) <= 8
        assert not objects.unknown(number % 2, digests(number)).any()
    np.testing.assert_array_equal(objects.unknown(0, digests(40, 46, 48)), [True, False, False])
    objects.note(0, digests(*range(100, 130)))
    assert len(objects) <= 8
    np.testing.assert_array_equal(objects.unknown(0, digests(100, 129)), [True, False])


@pytest.mark.parametrize("settings", [{"capacity": 0}, {"capacity": 1}, {"age_s": 0.0}])
def test_without_room_or_trust_nothing_is_known(settings):
    objects = known(**settings)
    objects.note(0, digests(1, 2))
    assert objects.unknown(0, digests(1, 2)).all()
    assert len(objects) == 0


@pytest.mark.parametrize("start_s", [0.0, 29.0, 31.0])
def test_what_was_seen_long_ago_is_asked_again(start_s):
    clock = ManualClock()
    objects = known(clock)
    clock.sleep(start_s)
    objects.note(0, digests(1))
    clock.sleep(30)
    assert not objects.unknown(0, digests(1)).any()
    clock.sleep(30)
    assert objects.unknown(0, digests(1)).all()
    objects.note(0, digests(1))
    clock.sleep(300)
    assert objects.unknown(0, digests(1)).all()

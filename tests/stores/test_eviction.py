from hybridkv.stores.eviction import LruEviction


def lru(*keys: str) -> LruEviction:
    policy = LruEviction()
    policy.stored(keys, None)
    return policy


def test_the_oldest_object_goes_first():
    assert list(lru("a", "b", "c").victims()) == ["a", "b", "c"]


def test_use_renews_in_the_order_of_the_batch():
    policy = lru("a", "b", "c", "d")
    policy.used(["c", "a", "c"])
    assert list(policy.victims()) == ["b", "d", "a", "c"]


def test_a_discarded_object_is_no_victim_and_comes_back_as_the_newest():
    policy = lru("a", "b", "c")
    policy.discarded(["a"])
    assert list(policy.victims()) == ["b", "c"]
    policy.stored(["a"], None)
    assert list(policy.victims()) == ["b", "c", "a"]


def test_looking_at_the_victims_changes_nothing():
    policy = lru("a", "b")
    assert next(policy.victims()) == "a"
    assert list(policy.victims()) == ["a", "b"]

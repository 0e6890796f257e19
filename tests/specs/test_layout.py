"""Layouts: what they derive, what they refuse, where they come from."""

import json

import pytest

from hybridkv.errors import ConfigError, SpecError
from hybridkv.plan.boundaries import check_retention
from hybridkv.specs.full import MLA, Full
from hybridkv.specs.group import CacheGroup
from hybridkv.specs.layout import Layout
from hybridkv.specs.layout_file import catalogue, find_layout, parse_layout
from hybridkv.specs.recurrent import Recurrent
from hybridkv.specs.sliding_window import SlidingWindow


def full(name="full", block_size=16, **more):
    return CacheGroup(name=name, spec=Full(block_size=block_size), **more)


def window(name="window", block_size=16, size=128, **more):
    return CacheGroup(name=name, spec=SlidingWindow(block_size=block_size, window=size), **more)


def test_cache_groups_of_equal_spec_and_lookahead_are_planned_together():
    layout = Layout(
        name="m",
        groups=(full(), window("a", layers=3), window("b", layers=2), window("c", lookahead=16)),
    )
    assert [group.cache_groups for group in layout.spec_groups] == [(0,), (1, 2), (3,)]
    assert [group.object_bytes for group in layout.spec_groups] == [1, 5, 1]
    assert layout.spec_groups[1].name == "a x2"


def test_groups_whose_ranks_or_objects_differ_are_planned_apart():
    layout = Layout(name="m", groups=(full("a", shards=2), full("b"), full("c", blocks_per_object=2)))
    assert [group.cache_groups for group in layout.spec_groups] == [(0,), (1,), (2,)]


def test_scratch_groups_keep_their_index_and_take_part_in_nothing():
    layout = Layout(name="m", groups=(window("scratch", block_size=24, prefix_cacheable=False), full()))
    assert [group.cache_groups for group in layout.spec_groups] == [(1,)]
    assert (layout.alignment, layout.hash_unit) == (16, 16)


def test_the_alignment_is_the_least_common_multiple_of_the_object_sizes():
    layout = Layout(name="m", groups=(full(block_size=16), window(block_size=24)))
    assert (layout.alignment, layout.hash_unit) == (48, 8)
    assert layout.with_object_tokens(64).alignment == 192


def test_the_margin_is_the_lookahead_in_whole_objects():
    groups = (
        full(block_size=16, lookahead=16),
        CacheGroup(name="s", spec=Recurrent(block_size=16), lookahead=16),
    )
    layout = Layout(name="m", groups=groups)
    assert layout.margin == 16
    assert layout.with_object_tokens(64).margin == 64
    assert Layout(name="m", groups=(groups[1],)).margin == 0


def test_ranks_share_what_they_hold_in_common():
    groups = (
        full("gqa", layers=2, layer_block_bytes=800, shards=4),
        CacheGroup(name="mla", spec=MLA(block_size=16), layer_block_bytes=70),
    )
    layout = Layout(name="m", groups=groups)
    ranks = {tp: [(g.num_ranks, g.object_bytes) for g in layout.with_tp(tp).spec_groups] for tp in (1, 2, 8)}
    assert ranks == {1: [(1, 1600), (1, 70)], 2: [(2, 800), (1, 70)], 8: [(4, 400), (1, 70)]}


def test_objects_pack_full_attention_and_mla_blocks_only():
    layout = find_layout("deepseek-v4").with_object_tokens(512)
    assert [group.object_size for group in layout.spec_groups] == [512, 64, 64, 4, 8]
    assert layout.spec_groups[0].object_bytes == 2 * find_layout("deepseek-v4").spec_groups[0].object_bytes
    assert find_layout("deepseek-v4").with_object_tokens(16).alignment == 256


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Layout(name="m", groups=()), "no prefix-cacheable group"),
        (lambda: Layout(name="m", groups=(full(prefix_cacheable=False),)), "no prefix-cacheable group"),
        (lambda: Layout(name="m", groups=(full(), full())), "'full' stands twice"),
        (lambda: Layout(name="m", groups=(full(block_size=24),), hash_unit=16), "'full'.*24.*hash unit 16"),
        (lambda: Layout(name="m", groups=(full(),), hash_unit=-1), "hash_unit is -1"),
        (lambda: Layout(name="m", groups=(full(),), tp=0), "tp is 0"),
        (lambda: Layout(name="m", groups=(full(),), tp=1 << 20), "tp is 1048576; give at most"),
        (lambda: Layout(name="m", groups=(full("a", 2_000_003), window("b", 2_000_029))), "common multiple"),
        (lambda: full(prefix_cacheable="false"), "prefix_cacheable is 'false'"),
        (lambda: full(layers=0), "'full': layers is 0"),
        (lambda: full(lookahead=-16), "lookahead is -16"),
        (lambda: full(shards="8"), "shards is '8'"),
        (lambda: full(layer_block_bytes=True), "layer_block_bytes is True"),
        (lambda: window(blocks_per_object=2), "'window': blocks_per_object is 2.*only full"),
        (lambda: Layout(name="m", groups=(full(shards=8),), tp=3), "8 shards.*3 tensor-parallel"),
        (lambda: Layout(name="m", groups=(full(shards=2, layer_block_bytes=7),), tp=2), "7 bytes.*2 ranks"),
        (lambda: Layout(name="m", groups=(full(),)).with_object_tokens(24), "24 tokens.*16"),
        (lambda: Layout(name="m", groups=(full(),)).with_object_tokens(0), "0 tokens"),
    ],
)
def test_what_cannot_work_is_refused_with_group_and_value(make, message):
    with pytest.raises(SpecError, match=message):
        make()


@pytest.mark.parametrize(
    ("retention", "message"),
    [(-1, "-1"), (True, "True"), ("most", "'most'"), (100, "alignment 256.*use 256$"), (300, "256 or 512")],
)
def test_a_retention_must_fit_the_layout(retention, message):
    with pytest.raises(ConfigError, match=message):
        check_retention(retention, find_layout("deepseek-v4"))


@pytest.mark.parametrize("retention", ["all", 0, 256, 1024])
def test_fitting_retentions_are_returned(retention):
    assert check_retention(retention, find_layout("deepseek-v4")) == retention


@pytest.mark.parametrize("name", catalogue())
def test_built_in_layouts_load_and_name_their_source(name):
    layout = find_layout(name)
    assert layout.name == name
    assert len(layout.source) > 40
    for tp in (2, 4, 8):
        assert layout.with_tp(tp).alignment == layout.alignment


def test_the_catalogue_has_the_groups_that_engines_show():
    shapes = {
        name: (len(find_layout(name).groups), len(find_layout(name).spec_groups)) for name in catalogue()
    }
    assert shapes == {
        "deepseek-v3": (1, 1),
        "deepseek-v4": (5, 5),
        "gemma-3-27b": (7, 2),
        "gpt-oss-120b": (2, 2),
        "llama-3.1-8b": (1, 1),
        "llama-4-scout": (4, 2),
        "qwen3-next-80b": (4, 2),
    }


GROUP = '[[groups]]\nkind = "full"\nblock_size = 16\n'
SIZED = GROUP + "layers = 2\nlayer_block_bytes = 64\n"


def test_a_layout_file_may_say_as_little_as_this(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text(SIZED)
    layout = find_layout(str(path))
    assert (layout.name, layout.groups[0].name, layout.alignment) == ("mine", "full", 16)
    assert layout.spec_groups[0].object_bytes == 128


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("groups = [", "not TOML"),
        ("a = " + "[" * 5000, "not TOML"),
        ("hash_unit = " + "9" * 5000, "not TOML"),
        ("hash_unit = 0x" + "f" * 6000 + "\n" + SIZED, "hash_unit is above"),
        (
            GROUP.replace("16", "9223372036854775808") + "layers = 1\nlayer_block_bytes = 1",
            "block_size is above",
        ),
        ('name = "m"', r"no \[\[groups\]\]"),
        ("groups = [1]", r"no \[\[groups\]\]"),
        ("name = 3\n" + SIZED, "name is 3"),
        ('hash_unit = "4"\n' + SIZED, "hash_unit is '4'"),
        ("hash_units = 4\n" + SIZED, "'hash_units' is unknown; did you mean 'hash_unit'"),
        ("[[groups]]\nblock_size = 16", r"groups\[0\]: kind is None"),
        ('[[groups]]\nkind = "full"', "block_size is missing"),
        ('[[groups]]\nkind = "ful"\nblock_size = 16', r"groups\[0\]: .*did you mean 'full'"),
        ('[[groups]]\nkind = "cross_attention"\nblock_size = 16', "refused"),
        (
            '[[groups]]\nkind = "sliding_window"\nblock_size = 16\nlayers = 1\nlayer_block_bytes = 1',
            "window is missing",
        ),
        (GROUP, "give layers, and kv_heads"),
        (GROUP + "layers = 2", "or layer_block_bytes"),
        (GROUP + "window = 4", "'window' is unknown"),
        (SIZED + "name = 4", "name is 4"),
        (SIZED + 'prefix_cacheable = "false"', "prefix_cacheable is 'false'"),
        (GROUP + "block_size = 8", "not TOML"),
        (GROUP + 'layer_block_bytes = 1\nlayers = "many"', "layers is 'many'"),
        (GROUP + "layers = 1\nkv_heads = 8", "give all of kv_heads, head_dim, dtype_bytes"),
        (GROUP + "layers = 1\nkv_heads = 8\nhead_dim = 64\ndtype_bytes = 2\nshards = 8", "not a mix"),
        (GROUP + "layers = 1\nkv_heads = 0\nhead_dim = 64\ndtype_bytes = 2", "kv_heads is 0"),
        ("hash_unit = 32\n" + SIZED, "'full'.*16.*hash unit 32"),
    ],
)
def test_a_wrong_layout_file_names_place_and_remedy(text, message):
    with pytest.raises(ConfigError, match=message) as caught:
        parse_layout(text, "mine.toml")
    assert str(caught.value).startswith("mine.toml: ")


def test_a_layout_that_is_nowhere_names_the_nearest(tmp_path):
    with pytest.raises(ConfigError, match="did you mean 'gpt-oss-120b'"):
        find_layout("gpt-os-120b")
    with pytest.raises(ConfigError, match="nor built in"):
        find_layout(str(tmp_path))
    with pytest.raises(ConfigError, match="nor built in"):
        find_layout("x" * 300)
    binary = tmp_path / "binary.toml"
    binary.write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="cannot be read as text"):
        find_layout(str(binary))


def test_layouts_are_plain_values():
    assert find_layout("deepseek-v4") == find_layout("deepseek-v4")
    assert json.dumps([group.object_size for group in find_layout("deepseek-v4").spec_groups]) == (
        "[256, 64, 64, 4, 8]"
    )

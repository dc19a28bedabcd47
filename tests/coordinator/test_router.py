"""The router's tables hold what replicas' caches hold, and its choices are those of the formula."""

from __future__ import annotations

import random
import statistics
import time
from itertools import takewhile

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_infer.config.capacity import GIB
from megatron_infer.config.inference import InferenceConfig
from megatron_infer.config.inference import PrefixCachingCoordinatorPolicy as Policy
from megatron_infer.config.machine_defaults import machine_config
from megatron_infer.coordinator.router import MAX_LOOKED_AT, Availability, PrefixTable, Route, Router, chain_of
from megatron_infer.errors import ConfigError
from megatron_infer.scheduler.context.block_digest import adapted, digest_of, preimage_of, root_of, salted
from megatron_infer.scheduler.context.block_pool import BlockPool
from megatron_infer.scheduler.context.build_context import build_context
from megatron_infer.scheduler.context.prefix_events import PrefixEvents

ROOT, OTHER = root_of(model="m"), root_of(model="m", weight_version=1)
BLOCK = 4


def packed(tokens) -> bytes:
    return b"".join(token.to_bytes(4, "little", signed=True) for token in tokens)


def make_router(count=3, policy=Policy.LONGEST_PREFIX, alpha=0.5, capacity=8, **options) -> Router:
    router = Router(policy, alpha, **options)
    for name in "abcdefgh"[:count]:
        router.join(name, capacity=capacity, block_size=BLOCK, root=ROOT)
    return router


def give(router, key, count):
    """Assign requests to a replica."""
    for _ in range(count):
        router.assign(Route(key=key))


def make_context(num_blocks=64, keep_cached=True, num_rows=8):
    return build_context(
        num_blocks=num_blocks,
        block_size=BLOCK,
        num_rows=num_rows,
        max_blocks_per_row=num_blocks,
        prefix_caching=True,
        keep_cached=keep_cached,
    )


def serve(context, tokens, root=ROOT, salt=""):
    """Compute a prompt in a cache -> (lease, tokens that were cached)."""
    lease = context.admit(tokens, root=salted(root, salt))
    assert lease is not None and context.extend(lease, len(tokens))
    context.publish_computed(lease, tokens, len(tokens))
    return lease, lease.cached


# ---------------------------------------------------------------------- tables follow caches


def test_chain_is_the_one_the_cache_publishes():
    context, tokens = make_context(), list(range(13))
    serve(context, tokens, salt="tenant")
    assert chain_of(ROOT, "tenant", packed(tokens), BLOCK) == context.pool.digests()
    assert chain_of(ROOT, "", packed(tokens), BLOCK) != context.pool.digests()
    prev, expected = salted(ROOT, ""), []
    for start in (0, 4, 8):
        prev = digest_of(preimage_of(prev, tokens[start : start + 4]))
        expected.append(prev)
    assert chain_of(ROOT, "", packed(tokens), BLOCK) == expected


def test_chain_stops_before_the_last_token_which_no_cache_serves():
    assert len(chain_of(ROOT, "", packed(range(8)), BLOCK)) == 1
    assert len(chain_of(ROOT, "", packed(range(9)), BLOCK)) == 2
    assert chain_of(ROOT, "", b"", BLOCK) == []


PROMPTS = st.lists(st.integers(0, 1), min_size=1, max_size=24)


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from("serve release version reset drop look".split()), PROMPTS), max_size=40),
    st.booleans(),
    st.sampled_from([2, 100]),
)
def test_table_holds_exactly_what_the_cache_holds_after_every_report(events, keep_cached, limit):
    context = make_context(num_blocks=12, keep_cached=keep_cached, num_rows=3)
    changes, table = PrefixEvents(context.pool, limit=limit), PrefixTable()
    leases, version = [], 0
    for kind, tokens in events:
        if kind == "serve":
            lease = context.admit(tokens, root=salted(root_of(model="m", weight_version=version), ""))
            if lease is not None and context.extend(lease, len(tokens)):
                context.publish_computed(lease, tokens, len(tokens))
                leases.append(lease)
            elif lease is not None:
                context.release(lease)
        elif kind == "release" and leases:
            context.release(leases.pop(len(tokens) % len(leases)))
        elif kind == "version":
            version += 1
            context.forget_free()
        elif kind == "reset":
            context.forget_all()
        elif kind == "drop":
            context.forget_free()
        if kind == "look":
            follow(table, changes)
            assert set(table._stamps) == set(context.pool.digests())
    context.check()
    follow(table, changes)
    assert set(table._stamps) == set(context.pool.digests())


def follow(table, changes):
    report = changes.take()
    if report is None:
        return
    if report.reset:
        table.clear()
    table.forget(report.forgotten)
    table.publish(report.published, 1)


def test_a_pool_without_events_works_alike():
    pool = BlockPool(4, keep_cached=True)
    block = pool.alloc(1)[0]
    assert pool.events is None and pool.publish(block, b"d" * 16, b"p") == block
    assert pool.digests() == [b"d" * 16]


def test_full_table_forgets_children_before_their_parents():
    table = PrefixTable(limit=4)
    old, new = ([bytes([kind, i]) * 8 for i in range(3)] for kind in (1, 2))
    table.publish(old, 1)
    table.publish(new, 2)
    assert len(table) == 4 and table.match(new) == 3 and table.match(old) == 1


def test_a_prompt_is_dropped_after_what_was_generated_from_it():
    router = make_router(1, max_digests=8)
    prompt = packed(range(8 * BLOCK + 1))
    chain = chain_of(ROOT, "", prompt, BLOCK)
    route = router.choose(prompt[: len(packed(range(4 * BLOCK + 1)))])
    router.assign(route)
    router.report(route.key, published=chain[:4])
    router.report(route.key, published=chain[4:])
    router.release(route)
    router.report(route.key, published=[bytes([number]) * 16 for number in range(2)])
    table = router.replicas[route.key].table
    assert [digest in table for digest in chain] == [True] * 6 + [False] * 2
    assert router.choose(prompt).matched == table.match(chain) == 6


def test_the_table_of_a_replica_that_says_how_many_blocks_it_has_drops_none_of_them():
    router = make_router(1, max_digests=8)
    router.join("large", capacity=8, block_size=BLOCK, root=ROOT, num_blocks=24)
    prompt = packed(range(24 * BLOCK + 1))
    chain = chain_of(ROOT, "", prompt, BLOCK)
    for start in range(0, len(chain), 3):
        for key in router.replicas:
            router.report(key, published=chain[start : start + 3])
    small, large = (view.table for view in router.replicas.values())
    assert large.match(chain) == 24 > small.match(chain), "the small one has dropped parents of blocks that it kept"


@settings(max_examples=100, deadline=None)
@given(st.lists(PROMPTS, min_size=1, max_size=12), st.integers(1, 6))
def test_a_full_table_never_matches_more_than_the_cache_holds(prompts, limit):
    """The oracle is the cache: as many blocks as a request that begins there shares."""
    context = make_context(num_blocks=16, num_rows=3)
    changes, table = PrefixEvents(context.pool, limit=100), PrefixTable(limit)
    for tokens in prompts:
        lease = context.admit(tokens, root=salted(ROOT, ""))
        if lease is not None and context.extend(lease, len(tokens)):
            context.publish_computed(lease, tokens, len(tokens))
        if lease is not None:
            context.release(lease)
        follow(table, changes)
        for seen in prompts:
            chain = chain_of(ROOT, "", packed(seen), BLOCK)
            held = set(context.pool.digests())
            assert table.match(chain) <= sum(1 for _ in takewhile(held.__contains__, chain))


@settings(max_examples=200, deadline=None)
@given(st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=4), max_size=12), st.integers(1, 6))
def test_table_never_grows_beyond_its_limit(batches, limit):
    table = PrefixTable(limit)
    for stamp, batch in enumerate(batches):
        table.publish([bytes([token]) * 16 for token in batch], stamp)
        assert len(table) <= limit
        assert bytes([batch[0]]) * 16 in table


# ---------------------------------------------------------------------- choices


@settings(max_examples=200, deadline=None)
@given(
    st.sampled_from([Policy.LONGEST_PREFIX, Policy.FIRST_PREFIX_BLOCK]),
    st.floats(0, 1),
    st.lists(st.tuples(st.integers(0, 5), st.integers(0, 12)), min_size=1, max_size=6),
)
def test_choice_has_the_best_score_of_the_formula(policy, alpha, replicas):
    """(matched blocks, load) of every replica; the oracle is the formula written down once more."""
    tokens = list(range(5 * BLOCK + 1))
    router = make_router(len(replicas), policy, alpha)
    chain = chain_of(ROOT, "", packed(tokens), BLOCK)
    for view, (matched, load) in zip(router.replicas.values(), replicas, strict=True):
        give(router, view.key, load)
        router.report(view.key, published=chain[:matched])
    scores = {}
    for view, (matched, load) in zip(router.replicas.values(), replicas, strict=True):
        share = min(matched, 1) if policy is Policy.FIRST_PREFIX_BLOCK else matched / 5
        scores[view.key] = alpha * share + (1 - alpha) * (1 - load / 8)
    route = router.choose(packed(tokens))
    assert scores[route.key] == pytest.approx(max(scores.values()))


EVENTS = st.lists(
    st.tuples(
        st.sampled_from(
            "publish publish assign assign release forget reset root close open reserve foreign leave".split()
        ),
        st.integers(0, 11),
        st.integers(0, 3),
        st.integers(0, 6),
    ),
    max_size=60,
)


@settings(max_examples=300, deadline=None)
@given(st.sampled_from(list(Policy)), st.sampled_from([0.0, 0.25, 0.5, 1.0]), EVENTS)
def test_choices_are_those_of_a_look_at_every_replica_whatever_has_happened_before(policy, alpha, events):
    router = Router(policy, alpha)
    for number in range(12):
        router.join(number, capacity=4, block_size=BLOCK, root=ROOT)
    prompts = [packed([family, *range(6 * BLOCK)]) for family in range(4)]
    routes, last = [], -1
    for kind, key, family, count in events:
        view = router.replicas.get(key)
        if view is None:
            continue
        chain = chain_of(view.root, "", prompts[family], BLOCK)[:count]
        if kind == "publish":
            router.report(key, published=chain)
        elif kind == "assign":
            routes.append(router.choose(prompts[family]))
            if routes[-1] is None:
                routes.pop()
            else:
                router.assign(routes[-1])
                last = router.replicas[routes[-1].key].index
        elif kind == "release" and routes:
            router.release(routes.pop(count % len(routes)))
        elif kind == "forget":
            router.report(key, forgotten=chain_of(view.root, "", prompts[family], BLOCK)[count:])
        elif kind == "reset":
            router.report(key, reset=True)
        elif kind == "root":
            router.set_root(key, (ROOT, OTHER)[count % 2])
        elif kind in ("close", "open", "reserve"):
            names = {"close": Availability.CLOSED, "open": Availability.OPEN, "reserve": Availability.RESERVE}
            router.set_availability(key, names[kind])
        elif kind == "foreign":
            router.set_foreign(key, count)
        elif kind == "leave":
            router.leave(key)
            routes = [route for route in routes if route.key != key]
        for prompt in prompts:
            found = router.choose(prompt)
            assert (found and (found.key, found.matched)) == choice_of_all(router, prompt, last), (kind, key)


def choice_of_all(router, prompt, last):
    """The rules, with a look at every replica."""
    views = [view for view in router.replicas.values() if view.availability is Availability.OPEN]
    views = views or [view for view in router.replicas.values() if view.availability is Availability.RESERVE]
    if not views:
        return None
    roomiest = max(views, key=lambda view: (view.free_share, -view.last_assigned, -view.index))
    if router.policy is Policy.ROUND_ROBIN:
        return ([view for view in views if view.index > last] or views)[0].key, 0
    if router.policy is Policy.LOAD_BALANCED:
        return roomiest.key, 0
    found = []
    for view in views:
        chain = chain_of(view.root, "", prompt, BLOCK)
        if router.policy is Policy.FIRST_PREFIX_BLOCK:
            chain = chain[:1]
        matched = next((count for count, digest in enumerate(chain) if digest not in view.table), len(chain))
        score = router.alpha * matched / len(chain) + (1 - router.alpha) * view.free_share
        if matched:
            order = (score, view.free_share, view.table.recency(chain[matched - 1]), -view.index)
            found.append((order, view.key, matched))
    if not found or max(found)[0][0] < (1 - router.alpha) * roomiest.free_share:
        return roomiest.key, 0
    return max(found)[1:]


@pytest.mark.parametrize("num_holders", [MAX_LOOKED_AT + 1, 150, 300])
def test_a_prefix_that_many_replicas_have_spreads_over_all_of_them_and_over_no_other(num_holders):
    router, tokens = Router(Policy.LONGEST_PREFIX, 1.0), packed(range(21))
    for key in range(300):
        router.join(key, capacity=8, block_size=BLOCK, root=ROOT)
        router.report(key, published=chain_of(ROOT, "", tokens, BLOCK) if key < num_holders else ())
    for _ in range(4 * num_holders):
        route = router.choose(tokens)
        assert route.matched == 5
        router.assign(route)
    loads = [view.load for view in router.replicas.values()]
    assert sum(loads[:num_holders]) == 4 * num_holders and set(loads[:num_holders]) <= {3, 4, 5}, loads


def test_the_cost_of_a_choice_hardly_grows_with_the_replicas():
    def cost_us(count):
        router = Router(Policy.LONGEST_PREFIX, 0.5)
        prompts = [packed([0, *range(8 * BLOCK), family, *range(9 * BLOCK)]) for family in range(count)]
        for key, prompt in enumerate(prompts):
            router.join(key, capacity=8, block_size=BLOCK, root=ROOT)
            router.report(key, published=chain_of(ROOT, "", prompt, BLOCK)[: 4 + key % 12])
        times = []
        for prompt in prompts[:: max(1, count // 128)] * (8 if count < 128 else 1):
            began = time.thread_time()
            route = router.choose(prompt)
            router.assign(route)
            router.release(route)
            times.append(time.thread_time() - began)
        return 1e6 * statistics.median(times)

    few, many = cost_us(16), cost_us(2048)  # 128 times as many
    assert many < 8 * few, (few, many)


def test_a_prefix_policy_without_an_alpha_follows_the_prefix_whatever_the_load():
    tokens, other = packed(range(21)), packed(range(100, 121))
    for policy, matched in ((Policy.LONGEST_PREFIX, 5), (Policy.FIRST_PREFIX_BLOCK, 1)):
        router = Router(policy)
        for key in "abc":
            router.join(key, capacity=8, block_size=BLOCK, root=ROOT)
        chain = chain_of(ROOT, "", tokens, BLOCK)
        router.report("b", published=chain[:matched])
        router.report("c", published=chain[: matched - 1])
        give(router, "b", 20)  # twelve requests wait there
        assert router.choose(tokens).key == "b" and router.choose(other).key == "a"
        router.report("c", published=chain)
        assert router.choose(tokens).key == "c", "of equals the one with more room"
    assert InferenceConfig().prefix_caching_routing_alpha == 1.0
    told = {"prefix_caching_coordinator_policy": "longest_prefix"}
    for asked, alpha in (({}, 0.5), (told, 1.0), (told | {"prefix_caching_routing_alpha": 0.25}, 0.25)):
        assert machine_config(asked, is_cuda=False, available_bytes=GIB).prefix_caching_routing_alpha == alpha


def test_equal_scores_go_to_the_latest_use_then_to_the_first_that_joined():
    router, tokens = make_router(), packed(range(9))
    chain = chain_of(ROOT, "", tokens, BLOCK)
    for key in "abc":
        router.report(key, published=chain)
    assert router.choose(tokens).key == "c"  # published last
    view = router.replicas["b"]
    view.table.touch(chain, 99)
    assert router.choose(tokens).key == "b"
    for view in router.replicas.values():
        view.table.touch(chain, 7)
    assert router.choose(tokens).key == "a"


def test_unknown_prompt_goes_to_the_least_loaded_and_equal_loads_take_turns():
    router = make_router()
    keys = []
    for _ in range(6):
        route = router.choose(packed(range(9)), salt=str(len(keys)))
        router.assign(route)
        keys.append(route.key)
    assert keys == ["a", "b", "c", "a", "b", "c"]
    assert make_router().choose(b"").key == "a"


def test_round_robin_takes_turns_and_skips_replicas_that_left():
    router = make_router(policy=Policy.ROUND_ROBIN)
    keys = []
    for count in range(7):
        if count == 4:
            router.leave("b")
        route = router.choose(packed(range(9)))
        router.assign(route)
        keys.append(route.key)
    assert keys == ["a", "b", "c", "a", "c", "a", "c"]


def test_load_balanced_ignores_prefixes_and_counts_requests_from_elsewhere():
    router, tokens = make_router(policy="load_balanced"), packed(range(9))
    router.report("a", published=chain_of(ROOT, "", tokens, BLOCK))
    give(router, "a", 3)
    router.set_foreign("b", 2)
    give(router, "c", 4)
    assert router.choose(tokens).key == "b"


def test_closed_replicas_get_nothing_and_those_in_reserve_only_what_no_other_takes():
    router, tokens = make_router(), packed(range(9))
    router.report("a", published=chain_of(ROOT, "", tokens, BLOCK))
    router.set_availability("a", Availability.CLOSED)
    router.set_availability("b", Availability.RESERVE)
    assert router.choose(tokens).key == "c"
    router.leave("c")
    assert router.choose(tokens).key == "b"
    router.leave("b")
    assert router.choose(tokens) is None


def test_blocks_on_their_way_draw_the_next_request_of_a_burst_and_are_forgotten_when_it_ends():
    router, tokens = make_router(alpha=0.9), packed(range(21))
    first = router.choose(tokens)
    router.assign(first)
    second = router.choose(tokens)
    assert (second.key, second.matched) == (first.key, 5)
    router.release(first)
    assert router.choose(tokens).matched == 0 and not router.replicas[first.key].table._expected


def test_new_weights_match_nothing_that_was_published_before():
    router, tokens = make_router(), packed(range(9))
    router.report("b", published=chain_of(ROOT, "", tokens, BLOCK))
    assert router.choose(tokens).matched == 2
    router.set_root("b", OTHER)
    assert router.choose(tokens).matched == 0
    router.report("b", published=chain_of(OTHER, "", tokens, BLOCK))
    assert (router.choose(tokens).key, router.choose(tokens).matched) == ("b", 2)


@pytest.mark.parametrize("policy", [Policy.LONGEST_PREFIX, Policy.FIRST_PREFIX_BLOCK])
def test_no_request_is_routed_by_the_prefix_of_another_adapter_or_content(policy):
    """One replica holds a prompt's blocks of the base model, of each content of an adapter, and of another name."""
    router, prompt = make_router(2, policy, alpha=1.0), packed(range(20))
    roots = {"base": ROOT, "french x": adapted(ROOT, "french", "x"), "french y": adapted(ROOT, "french", "y")}
    roots["sql x"] = adapted(ROOT, "sql", "x")
    chains = {name: chain_of(root, "", prompt, BLOCK) for name, root in roots.items()}
    assert len({chain[0] for chain in chains.values()}) == len(chains)
    for view in router.replicas.values():
        view.adapters = {"french": "y", "sql": "x"}
    asked = {"base": None, "french y": "french", "sql x": "sql"}
    for wanted, adapter in asked.items():
        for name, chain in chains.items():
            for key in router.replicas:
                router.report(key, reset=True)
            router.report("b", published=chain)
            route = router.choose(prompt, adapter=adapter)
            assert (route.matched > 0, route.key) == ((True, "b") if name == wanted else (False, "a")), (wanted, name)
    router.report("b", reset=True)
    route = router.choose(prompt, adapter="french")
    router.assign(route)
    matched = {wanted: router.choose(prompt, adapter=adapter).matched for wanted, adapter in asked.items()}
    assert matched == {"base": 0, "french y": len(route.chain), "sql x": 0}, "blocks that are on their way, too"


def test_wrong_settings_are_refused():
    with pytest.raises(ConfigError, match=r"alpha is 1\.5"):
        Router(Policy.LONGEST_PREFIX, 1.5)
    with pytest.raises(ValueError):
        Router("nearest")
    router = make_router(1)
    with pytest.raises(ConfigError, match="there already"):
        router.join("a", capacity=1, block_size=4, root=ROOT)
    with pytest.raises(ConfigError, match="capacity 0"):
        router.join("z", capacity=0, block_size=4, root=ROOT)


# ---------------------------------------------------------------------- a scripted load


def hit_rate(policy: Policy, *, replicas=4, families=16, requests=600, seed=0) -> float:
    """Share of prompt tokens served from caches that hold a few families' prefixes each."""
    rng = random.Random(seed)
    router = make_router(replicas, policy)
    names = list(router.replicas)
    caches = {name: make_context(num_blocks=60) for name in names}
    changes = {name: PrefixEvents(caches[name].pool) for name in names}
    prefixes = [[family * 1000 + i for i in range(40)] for family in range(families)]
    under_way, asked, cached = [], 0, 0
    for number in range(requests):
        tokens = prefixes[rng.randrange(families)] + [10**6 + number * 8 + i for i in range(8)]
        route = router.choose(packed(tokens))
        router.assign(route)
        lease, hit = serve(caches[route.key], tokens)
        asked, cached = asked + len(tokens), cached + hit
        under_way.append((route, lease))
        if len(under_way) > 4:
            old, lease = under_way.pop(rng.randrange(len(under_way)))
            caches[old.key].release(lease)
            router.release(old)
        for name in names:
            report = changes[name].take()
            if report is not None:
                router.report(name, reset=report.reset, published=report.published, forgotten=report.forgotten)
    return cached / asked


def test_prefix_policies_hit_far_more_than_turns_do_on_shared_prefixes():
    rates = {policy: hit_rate(policy) for policy in Policy}
    assert rates[Policy.LONGEST_PREFIX] > 0.7, rates
    assert rates[Policy.FIRST_PREFIX_BLOCK] > 0.7, rates
    assert rates[Policy.ROUND_ROBIN] < 0.5 and rates[Policy.LOAD_BALANCED] < 0.5, rates

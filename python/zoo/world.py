"""A synthetic shop: items of categories and brands, and users who move between them. No data is real.

Every item has a vector from its category, its brand and noise. A user repeatedly takes an item near a personal taste, popular
ones more often, and in a category that follows the previous one: the mean of the history is informative, its order more so. Some
clicked items are bought: by segments that like the brand, and cheap ones. Up to six tags indicate the direction of the vector.
"""

from __future__ import annotations

from typing import Any

import numpy as np

ITEMS, USERS, LENGTH = 400, 8000, 20
CATEGORIES, BRANDS, SEGMENTS = 8, 16, 4
TAGS, TAGS_MOST = 24, 6


class World:
    """Items as rows, histories ``[USERS, LENGTH]``, and the item that each user takes ``next``, ``bought`` or not."""

    def __init__(self, seed: int = 1):
        rng = np.random.default_rng(seed)
        self.category, self.brand = rng.integers(CATEGORIES, size=ITEMS), rng.integers(BRANDS, size=ITEMS)
        self.price = np.round(np.exp(rng.normal(3, 0.6, ITEMS)), 2)
        draw = lambda rows: rng.normal(0, 1, (rows, 6))  # noqa: E731
        vectors = draw(CATEGORIES)[self.category] + 0.7 * draw(BRANDS)[self.brand] + 0.5 * draw(ITEMS)
        popularity = rng.normal(0, 0.7, ITEMS)
        follows = rng.normal(0, 1.5, (CATEGORIES, CATEGORIES))
        taste = draw(USERS)
        self.segment = (taste @ draw(SEGMENTS).T).argmax(1)
        taken = np.zeros((USERS, LENGTH + 1), np.int64)
        seen = np.zeros((USERS, ITEMS), bool)
        for step in range(LENGTH + 1):
            scores = 0.6 * taste @ vectors.T + popularity + rng.gumbel(size=(USERS, ITEMS))
            if step:
                scores += follows[self.category[taken[:, step - 1]]][:, self.category]
            taken[:, step] = np.where(seen, -np.inf, scores).argmax(1)
            seen[np.arange(USERS), taken[:, step]] = True
        self.history, self.next = taken[:, :-1], taken[:, -1]
        likes = rng.normal(0, 1.5, (SEGMENTS, BRANDS))[self.segment, self.brand[self.next]]
        dear = np.log(self.price[self.next]) - 3
        self.bought = rng.random(USERS) < 1 / (1 + np.exp(0.5 - likes + dear))
        self.popularity = np.log1p(np.bincount(self.history[: USERS // 2].ravel(), minlength=ITEMS)).round(4)

        # A separate generator, so that the rest of the world does not change.
        drawn = np.random.default_rng((seed, TAGS))
        near = vectors @ drawn.normal(0, 1, (6, TAGS)) + 2 * drawn.gumbel(size=(ITEMS, TAGS))
        counts = drawn.integers(0, TAGS_MOST + 1, ITEMS)
        self.tags = [np.sort(np.argsort(-scores)[:count]) for scores, count in zip(near, counts)]

    def rows(self, *, with_tags: bool = False) -> list[dict[str, Any]]:
        """Returns the items as `sterling.export` takes them."""
        parts = zip(self.category, self.brand, self.price, self.popularity)
        rows: list[dict[str, Any]] = [
            {"id": n, "category": f"c{category}", "brand": f"b{brand}", "price": float(price), "popularity": float(popularity)}
            for n, (category, brand, price, popularity) in enumerate(parts)
        ]
        if with_tags:
            for row, tags in zip(rows, self.tags):
                row["tags"] = [f"t{tag:02}" for tag in tags] or None
        return rows

    def samples(self, users: list[int], *features: str) -> list[dict[str, Any]]:
        """Returns features of users as in requests; the second has a short history, the last none."""
        lengths = {1: 3, len(users) - 1: 0}
        made = []
        for n, user in enumerate(users):
            history = self.history[user].tolist()[: lengths.get(n, LENGTH)]
            made.append({"history": history, "segment": [f"s{self.segment[user]}"]})
        return [{name: values for name, values in sample.items() if name in features} for sample in made]

"""The Debian data for the trainer and the evaluation: the held-out users, and their hidden packages."""
import dataclasses
import pathlib

import numpy as np
import pandas as pd
import scipy.sparse as sp

TASKS = ["build", "depends", "recommends", "suggests"]
EDGES_MIN = 5
TEST_SHARE, VALIDATION_SHARE, HIDDEN_SHARE = 0.1, 0.05, 0.2


@dataclasses.dataclass
class Data:
    """Users are source packages, items binary ones; a user's history is the input of the model, `hidden` what it must find.

    Only users with at least EDGES_MIN edges are used. Training users hide nothing. Validation and test users hide a share of
    their edges, and are left out if their set of edges equals that of a training user.
    """

    items: pd.DataFrame
    users: pd.DataFrame
    train_users: np.ndarray
    validation_users: np.ndarray
    test_users: np.ndarray
    repeats_dropped: int
    train_edges: tuple  # users, items, labels [edges, T]
    hidden_edges: tuple
    history: dict  # user -> items
    hidden: dict

    @property
    def item_count(self):
        return len(self.items)

    def popularity(self, task=None):
        """Returns the number of training users of each item, with any label or with one."""
        _, items, labels = self.train_edges
        weights = None if task is None else labels[:, task]
        return np.bincount(items, weights=weights, minlength=self.item_count).astype(np.float64)

    def histories(self, users):
        return [self.history[user] for user in users]

    def hidden_sets(self, users):
        return [set(self.hidden[user].tolist()) for user in users]


def load(folder, seed):
    """Reads the three files and splits them; the same seed gives the same split."""
    folder, rng = pathlib.Path(folder), np.random.default_rng(seed)
    items, users, edges = (pd.read_parquet(folder / f"{name}.parquet") for name in ("items", "users", "edges"))
    edges = edges[edges.user.map(edges.groupby("user").size()) >= EDGES_MIN]
    user, item = edges.user.to_numpy(np.int64), edges.item.to_numpy(np.int64)
    labels = ((edges.labels.to_numpy()[:, None] >> np.arange(len(TASKS))) & 1).astype(np.float32)

    everyone = rng.permutation(np.unique(user))
    test_count, validation_count = int(len(everyone) * TEST_SHARE), int(len(everyone) * VALIDATION_SHARE)
    test, validation, train = np.split(everyone, [test_count, test_count + validation_count])
    trains = np.isin(user, train)
    hides = ~trains & (rng.random(len(user)) < HIDDEN_SHARE)
    history, hidden = _items_of(user, item, ~hides), _items_of(user, item, hides)

    sets = edges.groupby("user").item.apply(frozenset)
    seen = set(sets[train])
    asked = [user for user in np.sort(test) if user in hidden and user in history]
    strict = [user for user in asked if sets[user] not in seen]
    chosen_on = [user for user in np.sort(validation) if user in hidden and user in history and sets[user] not in seen]
    return Data(
        items=items,
        users=users,
        train_users=np.sort(train),
        validation_users=np.array(chosen_on),
        test_users=np.array(strict),
        repeats_dropped=len(asked) - len(strict),
        train_edges=(user[trains], item[trains], labels[trains]),
        hidden_edges=(user[hides], item[hides], labels[hides]),
        history=history,
        hidden=hidden,
    )


def _items_of(user, item, mask):
    return pd.Series(item[mask]).groupby(user[mask]).apply(np.array).to_dict()


class Labels:
    """Labels of pairs of users and items: those of their edge in the graph, or zeros without an edge."""

    def __init__(self, edges, item_count):
        user, item, labels = edges
        keys = user * item_count + item
        order = np.argsort(keys)
        self.keys, self.labels, self.item_count = keys[order], labels[order], item_count

    def __call__(self, users, items):
        """Returns [Q, K0, T] for users [Q] and items [Q, K0]."""
        wanted = np.asarray(users)[:, None] * self.item_count + items
        at = np.searchsorted(self.keys, wanted).clip(max=len(self.keys) - 1)
        return self.labels[at] * (self.keys[at] == wanted)[..., None]


def top_k(scores, k):
    """Returns the columns of the k highest scores of each row, best first; ties by lower column."""
    best = np.sort(np.argpartition(-scores, min(k, scores.shape[1] - 1), 1)[:, :k], 1)
    return np.take_along_axis(best, np.argsort(-np.take_along_axis(scores, best, 1), 1, kind="stable"), 1)


def recall(top, hidden, k):
    """Returns the mean share of each user's hidden items among the first k, over min(k, hidden)."""
    return float(np.mean([len(set(row[:k].tolist()) & some) / min(len(some), k) for row, some in zip(top, hidden)]))


def without_history(scores, histories):
    """Sets the scores of each user's history below all others, in place."""
    for row, history in zip(scores, histories):
        row[history] = -np.inf
    return scores


def by_popularity(data, users, k):
    """Ranks by the number of training users."""
    one = data.popularity().astype(np.float32)
    return np.concatenate([top_k(without_history(one[None].copy(), [data.history[user]]), k) for user in users])


def by_neighbours(data, users, k, block=256):
    """Item-kNN: the sum, over the user's items, of the cosine of their columns in the training matrix."""
    user, item, _ = data.train_edges
    count = np.maximum(data.popularity(), 1)
    training = sp.csr_matrix((np.ones(len(user), np.float32), (user, item)), shape=(len(data.users), data.item_count))
    columns = training @ sp.diags((1 / np.sqrt(count)).astype(np.float32))
    cosine = (columns.T @ columns).tocsr()
    cosine.setdiag(0)
    tops = []
    for at in range(0, len(users), block):
        histories = data.histories(users[at : at + block])
        rows = np.repeat(np.arange(len(histories)), [len(h) for h in histories])
        held = sp.csr_matrix(
            (np.ones(len(rows), np.float32), (rows, np.concatenate(histories))), shape=(len(histories), data.item_count)
        )
        tops.append(top_k(without_history(np.asarray((held @ cosine).todense()), histories), k))
    return np.concatenate(tops)

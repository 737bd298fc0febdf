//! The restricted pickle reader on what numpy writes, and the writer on what Python reads.

mod common;

use common::pickles;
use proptest::prelude::*;
use reward::pickle::{Pickled, read, write};

#[test]
fn matches_reference_numpy() {
    let fixtures = pickles();
    assert!(fixtures.len() >= 75);
    for (name, (bytes, expected)) in fixtures {
        let value = read(&bytes).unwrap_or_else(|error| panic!("{name}: {error}"));
        let scores = value.get("scores").and_then(Pickled::numbers).unwrap_or_else(|| panic!("{name}: {value:?}"));
        assert_eq!(scores, expected, "{name}");
    }
}

#[test]
fn everything_around_the_scores_is_read_too() {
    let value = read(&pickles()["rich-5"].0).expect("readable");
    assert_eq!(value.get("names"), Some(&Pickled::List(vec![Pickled::Str("a".into()), Pickled::Str("é".into())])));
    assert_eq!(value.get("raw"), Some(&Pickled::Bytes(vec![0, 255])));
    assert_eq!(value.get("none"), Some(&Pickled::None));
    let ones = value.get("rewards").and_then(|rewards| rewards.get("strict"));
    assert_eq!(ones, Some(&Pickled::Array { shape: vec![2, 3], values: vec![1.0; 6] }));
}

fn value() -> impl Strategy<Value = Pickled> {
    let leaf = prop_oneof![
        Just(Pickled::None),
        any::<bool>().prop_map(Pickled::Bool),
        any::<i64>().prop_map(Pickled::Int),
        (-1e9f64..1e9).prop_map(Pickled::Float),
        ".{0,20}".prop_map(Pickled::Str),
        prop::collection::vec(any::<u8>(), 0..300).prop_map(Pickled::Bytes),
    ];
    leaf.prop_recursive(4, 40, 6, |inner| {
        prop_oneof![
            prop::collection::vec(inner.clone(), 0..6).prop_map(Pickled::List),
            prop::collection::vec(inner.clone(), 0..6).prop_map(Pickled::Tuple),
            prop::collection::btree_map(".{0,5}", inner, 0..6)
                .prop_map(|map| Pickled::Dict(map.into_iter().map(|(key, value)| (Pickled::Str(key), value)).collect())),
        ]
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn what_is_written_is_read_back(value in value()) {
        prop_assert_eq!(read(&write(&value)), Ok(value));
    }
}

#[test]
fn python_reads_what_is_written() {
    let value = Pickled::Dict(vec![
        (Pickled::Str("images".into()), Pickled::List(vec![Pickled::Bytes(vec![0, 255, 10]); 2])),
        (Pickled::Str("prompts".into()), Pickled::List(vec![Pickled::Str("é".into()), Pickled::Str(String::new())])),
        (
            Pickled::Str("more".into()),
            Pickled::Tuple(vec![Pickled::Int(-1 << 40), Pickled::Float(0.1), Pickled::Bool(true), Pickled::None]),
        ),
    ]);
    let folder = tempfile::tempdir().expect("folder");
    let path = folder.path().join("value.pkl");
    std::fs::write(&path, write(&value)).expect("write");
    let script = "import pickle, sys\nprint(ascii(pickle.load(open(sys.argv[1], 'rb'))))";
    let output = std::process::Command::new(common::python()).args(["-c", script]).arg(&path).output().expect("python3");
    let expected = r"{'images': [b'\x00\xff\n', b'\x00\xff\n'], 'prompts': ['\xe9', ''], 'more': (-1099511627776, 0.1, True, None)}";
    assert_eq!(String::from_utf8_lossy(&output.stdout).trim(), expected);
}

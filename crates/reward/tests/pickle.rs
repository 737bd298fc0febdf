//! The restricted pickle reader: what numpy writes is understood, everything hostile is refused, nothing makes it panic or grow.
//!
//! `FLASH_GRPO_FUZZ_SECONDS=600 cargo test --release -p reward --test pickle` spends that long on mutations.

mod common;

use std::collections::BTreeMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::{Duration, Instant};

use base64::Engine;
use proptest::prelude::*;
use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::{Rng, SeedableRng};
use reward::pickle::{Pickled, read, write};

#[derive(serde::Deserialize)]
struct Fixture {
    pickle: String,
    scores: Vec<f64>,
}

fn fixtures() -> BTreeMap<String, (Vec<u8>, Vec<f64>)> {
    let file = std::fs::read(common::test_file("fixtures/pickles.json")).expect("fixtures");
    let fixtures: BTreeMap<String, Fixture> = serde_json::from_slice(&file).expect("json");
    let decode = |text: &str| base64::engine::general_purpose::STANDARD.decode(text).expect("base64");
    fixtures.into_iter().map(|(name, fixture)| (name, (decode(&fixture.pickle), fixture.scores))).collect()
}

#[test]
fn matches_reference_numpy() {
    let fixtures = fixtures();
    assert!(fixtures.len() >= 75);
    for (name, (bytes, expected)) in fixtures {
        let value = read(&bytes).unwrap_or_else(|error| panic!("{name}: {error}"));
        let scores = value.get("scores").and_then(Pickled::numbers).unwrap_or_else(|| panic!("{name}: {value:?}"));
        assert_eq!(scores, expected, "{name}");
    }
}

#[test]
fn everything_around_the_scores_is_read_too() {
    let value = read(&fixtures()["rich-5"].0).expect("readable");
    assert_eq!(value.get("names"), Some(&Pickled::List(vec![Pickled::Str("a".into()), Pickled::Str("é".into())])));
    assert_eq!(value.get("raw"), Some(&Pickled::Bytes(vec![0, 255])));
    assert_eq!(value.get("none"), Some(&Pickled::None));
    let ones = value.get("rewards").and_then(|rewards| rewards.get("strict"));
    assert_eq!(ones, Some(&Pickled::Array { shape: vec![2, 3], values: vec![1.0; 6] }));
}

/// Bytes of a pickle by parts.
fn parts(parts: &[&[u8]]) -> Vec<u8> {
    parts.concat()
}

#[test]
fn names_that_are_not_data_are_refused_by_name() {
    let text = |text: &str| parts(&[b"\x8c", &[text.len() as u8], text.as_bytes()]);
    let hostile = [
        (parts(&[b"cos\nsystem\n(S'x'\ntR."]), "`os.system`"),
        (parts(&[b"\x80\x02cbuiltins\neval\nX\x01\0\0\0x\x85R."]), "`builtins.eval`"),
        (parts(&[b"\x80\x04", &text("posix"), &text("system"), b"\x93", &text("id"), b"\x85R."]), "`posix.system`"),
        (parts(&[b"\x80\x04", &text("numpy"), &text("load"), b"\x93."]), "`numpy.load`"),
        (
            parts(&[b"\x80\x04", &text("numpy._core.multiarray"), &text("scalar.__globals__"), b"\x93."]),
            "`numpy._core.multiarray.scalar.__globals__`",
        ),
        (parts(&[b"\x80\x04", &text("numpy.f2py.crackfortran"), &text("myeval"), b"\x93."]), "`numpy.f2py.crackfortran.myeval`"),
        (parts(&[b"(S'x'\nios\nsystem\n."]), "0x53"),
        (parts(&[b"(ios\nsystem\n."]), "it calls `os.system`"),
        (parts(&[b"(cos\nsystem\no."]), "`os.system`"),
        (parts(&[b"((o."]), "an object of a class"),
        (parts(&[b")\x81."]), "an object of a class"),
        (parts(&[b"Pid\n."]), "outside of it"),
        (parts(&[b"\x82\x01."]), "registered extension"),
        (parts(&[b"\x97."]), "buffer outside"),
        (parts(&[b"\x80\x09."]), "protocol is 9"),
        (parts(&[b"cnumpy\ndtype\n."]), "uses `numpy.dtype` as a value"),
        (parts(&[b"cnumpy\ndtype\nX\x02\0\0\0O8\x85R."]), "numpy type `O8`"),
        (parts(&[b"cnumpy\nndarray\n)R."]), "arguments that numpy does not write"),
        (parts(&[b"c_codecs\nencode\nX\x01\0\0\0xX\x04\0\0\0rot1\x86R."]), "arguments that numpy does not write"),
        (parts(&[b"K\x01K\x02R."]), "calls what is no name"),
        (parts(&[b"]}b."]), "to what is no tuple"),
    ];
    for (bytes, reason) in hostile {
        let error = read(&bytes).expect_err(reason);
        assert!(error.starts_with("the pickle is refused: ") && error.contains(reason), "{reason}: {error}");
    }
}

#[test]
fn small_pickles_cannot_become_large() {
    let deep = parts(&[&b"]".repeat(100_000), &b"a".repeat(99_999), b"."]);
    let laughs: Vec<u8> = parts(&[b"]", &b"2\x86".repeat(60), b"."]);
    let doubled: Vec<u8> =
        parts(&[b"]", &(0..60u8).flat_map(|i| [b"q".as_slice(), &[i], b"h", &[i], b"\x86"].concat()).collect::<Vec<u8>>(), b"."]);
    let endless = parts(&[b"]q\0h\0a."]);
    let many = parts(&[&b"N".repeat(5_000_000), b"."]);
    let marks = parts(&[&b"(".repeat(5_000_000), b"."]);
    let long_text = parts(&[b"\x8d", &u64::MAX.to_le_bytes(), b"x."]);
    // One array after the other from the same bytes.
    let bytes = vec![0u8; 1 << 20];
    let array = b"(h\0h\x01h\x02X\x01\0\0\0CtR";
    let arrays = parts(&[
        b"(B",
        &(bytes.len() as u32).to_le_bytes(),
        &bytes,
        b"q\0cnumpy\ndtype\nX\x02\0\0\0b1\x85Rq\x01J\0\0\x10\0\x85q\x02cnumpy._core.numeric\n_frombuffer\nq\x03",
        &[&b"h\x03"[..], array].concat().repeat(100),
        b"t.",
    ]);
    let same_key = parts(&[b"}(", &b"K\x01N".repeat(400_000), b"u."]);
    for (name, bytes) in [
        ("deep", deep),
        ("laughs", laughs),
        ("doubled", doubled),
        ("endless", endless),
        ("many", many),
        ("marks", marks),
        ("long text", long_text),
        ("arrays", arrays),
        ("same key", same_key),
    ] {
        let start = Instant::now();
        let result = read(&bytes);
        assert!(name == "same key" || result.is_err(), "{name}");
        assert!(start.elapsed() < Duration::from_secs(5), "{name}: {:?}", start.elapsed());
    }
}

/// Instructions to put in the way.
const CODES: &[u8] = b"(.0123NKGX]}aesutdlRbcqh\x85\x86\x87\x88\x8c\x93\x94\x96";

#[test]
fn mutations_never_panic_and_never_take_long() {
    let fixtures: Vec<Vec<u8>> = fixtures().into_values().map(|(bytes, _)| bytes).collect();
    let mut random = ChaCha8Rng::seed_from_u64(1);
    let mut below = move |n: usize| (random.next_u64() % n as u64) as usize;
    let seconds = std::env::var("FLASH_GRPO_FUZZ_SECONDS").ok().and_then(|s| s.parse().ok()).unwrap_or(0);
    let (end, mut done, mut refused) = (Instant::now() + Duration::from_secs(seconds), 0, 0);
    while done < 20_000 || Instant::now() < end {
        let mut bytes = fixtures[below(fixtures.len())].clone();
        for _ in 0..=below(4) {
            let (at, other) = (below(bytes.len()), &fixtures[below(fixtures.len())]);
            match below(5) {
                0 => bytes[at] = below(256) as u8,
                1 => bytes.truncate(at.max(1)),
                2 => drop(bytes.remove(at.min(bytes.len() - 1))),
                3 => bytes.insert(at, CODES[below(CODES.len())]),
                _ => {
                    let from = below(other.len());
                    let piece = other[from..(from + 1 + below(30)).min(other.len())].to_vec();
                    bytes.splice(at..at, piece);
                }
            }
            if bytes.is_empty() {
                bytes.push(b'.');
            }
        }
        let start = Instant::now();
        let result = catch_unwind(AssertUnwindSafe(|| read(&bytes))).unwrap_or_else(|_| panic!("this made it panic: {bytes:?}"));
        assert!(start.elapsed() < Duration::from_secs(5), "this took {:?}: {bytes:?}", start.elapsed());
        refused += usize::from(result.is_err());
        done += 1;
    }
    assert!(refused > done / 4 && refused < done, "{refused} of {done}");
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

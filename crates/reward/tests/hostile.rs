//! Answers with anything in them: an error or a value, never a panic, nothing executed, nothing that grows or takes long.
//!
//! `FLASH_GRPO_FUZZ_SECONDS=600 cargo test --release -p reward --test hostile` spends that long on mutations of each.

mod common;

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::{Duration, Instant};

use common::pickles;
use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::{Rng, SeedableRng};
use reward::Aggregation;
use reward::pickle::read;
use reward::protocol::parse_answer;

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

/// Calls `open` with mutations of the samples, `count` times or for as long as the environment says; how many calls there were, and how many
/// of them were refused.
fn mutate<T, E>(samples: &[Vec<u8>], count: usize, codes: &[u8], open: impl Fn(&[u8]) -> Result<T, E>) -> (usize, usize) {
    let mut random = ChaCha8Rng::seed_from_u64(1);
    let mut below = move |n: usize| (random.next_u64() % n as u64) as usize;
    let seconds = std::env::var("FLASH_GRPO_FUZZ_SECONDS").ok().and_then(|s| s.parse().ok()).unwrap_or(0);
    let (end, mut done, mut refused) = (Instant::now() + Duration::from_secs(seconds), 0, 0);
    while done < count || Instant::now() < end {
        let mut bytes = samples[below(samples.len())].clone();
        for _ in 0..=below(4) {
            let (at, other) = (below(bytes.len()), &samples[below(samples.len())]);
            match below(5) {
                0 => bytes[at] = below(256) as u8,
                1 => bytes.truncate(at.max(1)),
                2 if bytes.len() > 1 => drop(bytes.remove(at)),
                3 => bytes.insert(at, codes[below(codes.len())]),
                _ => {
                    let from = below(other.len());
                    let piece = other[from..(from + 1 + below(30)).min(other.len())].to_vec();
                    bytes.splice(at..at, piece);
                }
            }
        }
        let start = Instant::now();
        let result = catch_unwind(AssertUnwindSafe(|| open(&bytes))).unwrap_or_else(|_| panic!("this made it panic: {bytes:?}"));
        assert!(start.elapsed() < Duration::from_secs(5), "this took {:?}: {bytes:?}", start.elapsed());
        refused += usize::from(result.is_err());
        done += 1;
    }
    (done, refused)
}

#[test]
fn mutated_pickles_never_panic_and_never_take_long() {
    let samples: Vec<Vec<u8>> = pickles().into_values().map(|(bytes, _)| bytes).collect();
    let (done, refused) = mutate(&samples, 20_000, CODES, read);
    assert!(refused > done / 4 && refused < done, "{refused} of {done}");
}

#[test]
fn mutated_answers_never_panic_and_never_become_numbers_that_are_none() {
    let samples = [
        r#"{"scores": [{"id": "a", "value": NaN}, {"id": "b", "frame_values": [1, 2e300, -Infinity], "components": {"x": 0.1}}]}"#,
        r#"{"scores": [{"id": "a", "value": 0.5, "error": "no \" \\u00e9"}, {"id": "b", "error": "x"}]}"#,
        r#"{"scores": [{"id": "b", "value": -1e-3}, {"id": "a", "frame_values": [0.25, 0.5]}]}"#,
    ];
    let samples: Vec<Vec<u8>> = samples.iter().map(|text| text.as_bytes().to_vec()).collect();
    let (done, refused) = mutate(&samples, 20_000, b"\"\\{}[]:,0e-NI", |bytes| {
        let scores = parse_answer(bytes, &[("a", 2), ("b", 3)], Aggregation::Mean)?;
        assert_eq!(scores.len(), 2);
        assert!(scores.iter().flatten().all(|score| score.value.is_finite() && score.components.values().all(|value| value.is_finite())));
        Ok::<_, String>(())
    });
    assert!(refused > done / 4 && refused < done, "{refused} of {done}");
}

//! The memory that encoding takes besides the embeddings does not grow with the prompts.

#![cfg(target_os = "linux")]

use burn::tensor::Device;
use std::path::Path;

/// The most memory that this process has had.
fn peak_mib() -> usize {
    let status = std::fs::read_to_string("/proc/self/status").expect("status");
    let kib = status.lines().find_map(|line| line.strip_prefix("VmHWM:")?.trim().strip_suffix(" kB")?.parse::<usize>().ok());
    kib.expect("VmHWM") / 1024
}

#[test]
fn positions_are_kept_once_for_all_prompts() {
    let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../golden/wan-tiny/text_encoder");
    let encode = |prompts: usize| {
        let ids: Vec<Vec<u32>> = (0..prompts).map(|i| vec![5; 505 + i % 8]).collect();
        wan::umt5::encode_in_stages(&dir, &ids, &Device::flex(), &mut |_, _| {}).expect("encodes")
    };
    drop(encode(8));
    let before = peak_mib();
    drop(encode(96));
    let grown = peak_mib() - before;
    // the embeddings are 6 MiB; a table of positions is 1 MiB, and would be one of 96
    assert!(grown < 60, "{grown} MiB more for 12 times the prompts");
}

//! `flash-grpo inspect`, as a user sees it: the recipes for the released models, without the models.

use assert_cmd::Command;
use std::path::Path;

fn inspect(arguments: &[&str]) -> String {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let mut command = Command::new(env!("CARGO_BIN_EXE_flash-grpo"));
    let output = command.current_dir(root).arg("inspect").args(arguments).output().expect("runs");
    format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr))
}

/// The step table and what is trained.
fn steps(recipe: &str) -> String {
    let text = inspect(&[recipe]);
    text.split_once("\nstep ").map_or(text.clone(), |(_, table)| format!("step {table}"))
}

#[test]
fn recipes_of_released_models() {
    insta::assert_snapshot!("wan_1_3b", steps("recipes/flash_grpo_wan_1_3b.toml"));
    insta::assert_snapshot!("wan_14b", steps("recipes/flash_grpo_wan_14b.toml"));
    insta::assert_snapshot!("wan_i2v_14b", steps("recipes/flash_grpo_wan_i2v_14b.toml"));
    insta::assert_snapshot!("wan2_2_i2v_a14b", steps("recipes/flash_grpo_wan2_2_i2v_a14b.toml"));
    insta::assert_snapshot!("wan2_2_ti2v_5b", inspect(&["recipes/flash_grpo_wan2_2_ti2v_5b.toml"]));
    insta::assert_snapshot!("wan2_2_t2v_a14b", inspect(&["recipes/flash_grpo_wan2_2_t2v_a14b.toml"]));
}

#[test]
fn json_says_which_network_takes_which_step() {
    let text = inspect(&["recipes/flash_grpo_wan2_2_t2v_a14b.toml", "--json"]);
    let json: serde_json::Value = serde_json::from_str(&text).expect("JSON");
    assert_eq!(json["boundary_ratio"], 0.875);
    let networks: Vec<&str> = json["networks"].as_array().expect("list").iter().filter_map(|name| name.as_str()).collect();
    let expected = (0..12).map(|step| if step < 4 { "transformer" } else { "transformer_2" });
    assert!(networks.iter().copied().eq(expected), "{networks:?}");
    // rank 16, 8 projections of 5120 x 5120 in 40 blocks, twice
    assert_eq!(json["trained"]["parameters"], 2 * 40 * 8 * 16 * 2 * 5120);
    assert_eq!(json["trained"]["layers"], 640);
}

/// As `inspect | head` leaves it: no panic, and the code of a broken pipe.
#[cfg(unix)]
#[test]
fn a_reader_may_leave() {
    let mut command = std::process::Command::new(env!("CARGO_BIN_EXE_flash-grpo"));
    let command = command.arg("inspect").stdout(std::process::Stdio::piped()).stderr(std::process::Stdio::piped());
    let mut child = command.spawn().expect("runs");
    drop(child.stdout.take());
    let output = child.wait_with_output().expect("child");
    assert_eq!(output.status.code(), Some(141), "{}", String::from_utf8_lossy(&output.stderr));
    assert!(output.stderr.is_empty(), "{}", String::from_utf8_lossy(&output.stderr));
}

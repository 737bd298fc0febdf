//! The recipe that docs/extending.md shows in full runs.
#![cfg(unix)]

use std::path::{Path, PathBuf};

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").canonicalize().expect("the repository")
}

#[test]
fn the_recipe_of_the_documentation_runs() {
    let document = std::fs::read_to_string(root().join("docs/extending.md")).expect("docs/extending.md");
    let recipe = document.split("```toml\n").nth(1).and_then(|rest| rest.split("```").next()).expect("a recipe");
    let folder = tempfile::tempdir().expect("folder");
    std::fs::write(folder.path().join("flash-grpo-cps.toml"), recipe).expect("write");
    std::os::unix::fs::symlink(root().join("models"), folder.path().join("models")).expect("link");
    let short = ["train.iterations=1", "rollout.prompts_per_iteration=2", "eval.samples_per_prompt=1", "eval.num_prompts=4"];
    for command in ["inspect", "train"] {
        let mut program = assert_cmd::Command::new(env!("CARGO_BIN_EXE_flash-grpo"));
        program.current_dir(folder.path()).args([command, "flash-grpo-cps.toml"]);
        if command == "train" {
            program.args(short.iter().flat_map(|change| ["--set", change]));
        }
        program.assert().success();
        assert!(document.contains(&format!("flash-grpo {command} flash-grpo-cps.toml")));
    }
    assert!(folder.path().join("runs/flash-grpo-cps/report.html").is_file());
}

//! The change that docs/extending.md shows can be made: it fits the files as they are now.

use std::path::Path;

/// One place of a change: the lines that are there, and the lines that are to be there.
struct Hunk {
    file: String,
    old: String,
    new: String,
}

fn read(path: &str) -> String {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").join(path);
    std::fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

/// The places of a unified diff.
fn hunks(diff: &str) -> Vec<Hunk> {
    let (mut hunks, mut file): (Vec<Hunk>, String) = (Vec::new(), String::new());
    for line in diff.lines() {
        if let Some(name) = line.strip_prefix("+++ b/") {
            file = name.to_owned();
        } else if line == "@@" {
            hunks.push(Hunk { file: file.clone(), old: String::new(), new: String::new() });
        } else if let Some(hunk) = hunks.last_mut().filter(|_| !line.starts_with("---")) {
            let (kind, text) = line.split_at(1.min(line.len()));
            for (side, drawn_by) in [(&mut hunk.old, "-"), (&mut hunk.new, "+")] {
                if kind != "+" && kind != "-" || kind == drawn_by {
                    side.push_str(text);
                    side.push('\n');
                }
            }
        }
    }
    hunks
}

#[test]
fn the_noise_level_of_the_documentation_applies() {
    let document = read("docs/extending.md");
    let diff = document.split("```diff\n").nth(1).and_then(|rest| rest.split("\n```").next()).expect("a diff");
    let added = diff.lines().filter(|line| line.starts_with('+') && !line.starts_with("+++")).count();
    assert!(added <= 30 && document.contains(&format!("A noise level: {added} lines")), "{added} lines");
    let hunks = hunks(diff);
    assert_eq!(hunks.len(), 6);
    for Hunk { file, old, new } in hunks {
        let text = read(&file);
        assert_eq!(text.matches(&old).count(), 1, "{file} has not, or not only once:\n{old}");
        assert!(!text.contains(&new), "{file} has it already:\n{new}");
    }
}

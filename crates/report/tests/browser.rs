//! The pages in a real browser: videos play, nothing is fetched, nothing complains, everything fits a phone.
//!
//! Needs Chromium: `$CHROMIUM`, or `chromium`, `chromium-browser` or `google-chrome` on the path; without one, each test says that it was skipped.
//! `FLASH_GRPO_PICTURES=FOLDER` keeps pictures of all pages, for people to look at.
#![cfg(unix)]

mod chromium;
mod common;

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use chromium::{Browser, Page, View, find};
use serde_json::json;
use std::io::Write;
use std::path::{Path, PathBuf};

const VIEWS: [View; 4] = [
    View { width: 375, dark: false },
    View { width: 375, dark: true },
    View { width: 1280, dark: false },
    View { width: 1280, dark: true },
];

/// Runs a test if there is a browser.
fn with_browser(test: impl FnOnce(Browser)) {
    match find() {
        Some(program) => test(Browser::start(&program)),
        // straight to the terminal: what a test prints otherwise is shown only if it fails
        None => {
            let _ = writeln!(std::io::stderr(), "skipped: no Chromium on the path; install it, or name it in `CHROMIUM`");
        }
    }
}

/// Opens all sections, plays every video, and returns what is wrong with them.
const PLAY: &str = "(async () => {
    document.querySelectorAll('details').forEach(details => details.open = true);
    const play = async video => {
        const played = new Promise((done, failed) => {
            video.addEventListener('timeupdate', () => video.currentTime > 0 && done());
            video.addEventListener('error', () => failed(video.error.message));
            setTimeout(() => failed('it stands at ' + video.currentTime + ', state ' + video.readyState), 90000);
        });
        try { if (video.error) throw video.error.message; await Promise.all([video.play(), played]); }
        catch (error) { return video.getAttribute('aria-label') + ': ' + error; }
    };
    return (await Promise.all([...document.querySelectorAll('video')].map(play))).filter(wrong => wrong);
})()";

/// What is wider than the window without being scrollable by keyboard, and text that is too small to read.
const MISFITS: &str = "(() => {
    const wrong = [];
    if (document.documentElement.scrollWidth > innerWidth) wrong.push('the page is ' + document.documentElement.scrollWidth + ' wide');
    for (const part of document.querySelectorAll('body *')) {
        const scrolls = ['auto', 'scroll'].includes(getComputedStyle(part).overflowX) && part.scrollWidth > part.clientWidth;
        if (scrolls && part.tabIndex < 0) wrong.push('not reachable: ' + part.outerHTML.slice(0, 80));
    }
    for (const text of document.querySelectorAll('svg text')) {
        const height = text.getBoundingClientRect().height;
        if (height > 0 && height < 11) wrong.push('too small: ' + text.textContent + ' ' + height);
    }
    for (const swatch of document.querySelectorAll('.swatch')) {
        const height = swatch.getBoundingClientRect().height;
        if (height > 20) wrong.push('a swatch ' + height + ' high');
    }
    return wrong;
})()";

/// What every page must satisfy, however it is looked at.
fn check(browser: &mut Browser, file: &Path, name: &str, videos: usize) {
    for view in VIEWS {
        let mut page = browser.open(file, view);
        let what = format!("{name} {}{}", view.width, if view.dark { " dark" } else { "" });
        keep_picture(&mut page, &what);
        assert_eq!(page.evaluate("document.querySelectorAll('video').length"), videos, "{what}");
        assert_eq!(page.evaluate(PLAY), json!([]), "{what}");
        assert_eq!(page.evaluate(MISFITS), json!([]), "{what}");
        keep_picture(&mut page, &format!("{what} opened"));
        assert_eq!(page.complaints(), [""; 0], "{what}");
        assert_eq!(page.requests(), [format!("file://{}", file.display())], "{what}");
        let ground = page.evaluate("getComputedStyle(document.body).backgroundColor");
        assert_eq!(ground == "rgb(255, 255, 255)", !view.dark, "{what}: {ground}");
    }
}

fn keep_picture(page: &mut Page<'_>, name: &str) {
    let Some(folder) = std::env::var_os("FLASH_GRPO_PICTURES").map(PathBuf::from) else { return };
    let bytes = STANDARD.decode(page.picture()).expect("base64");
    std::fs::create_dir_all(&folder).expect("folder");
    std::fs::write(folder.join(format!("{}.png", name.replace(' ', "-"))), bytes).expect("picture");
}

fn page(folder: &Path, of: &[&Path]) -> PathBuf {
    let file = folder.join("report.html");
    std::fs::write(&file, report::html(of, folder).expect("page")).expect("write");
    file
}

#[test]
fn a_run_plays() {
    with_browser(|mut browser| {
        let folder = tempfile::tempdir().expect("folder");
        common::finished_run(folder.path(), "flash-grpo", 1, -0.1);
        check(&mut browser, &page(folder.path(), &[folder.path()]), "run", 12);
    });
}

#[test]
fn a_comparison_plays() {
    with_browser(|mut browser| {
        let folder = tempfile::tempdir().expect("folder");
        common::comparison(folder.path(), 20);
        check(&mut browser, &page(folder.path(), &[folder.path()]), "comparison", 8);
        let small = tempfile::tempdir().expect("folder");
        common::comparison(small.path(), 3);
        check(&mut browser, &page(small.path(), &[small.path()]), "small-comparison", 8);
    });
}

#[test]
fn several_runs_play() {
    with_browser(|mut browser| {
        let folder = tempfile::tempdir().expect("folder");
        let runs: Vec<PathBuf> = (1..=3).map(|seed| folder.path().join(format!("seed-{seed}"))).collect();
        for (seed, run) in (1..).zip(&runs) {
            common::finished_run(run, "flash-grpo", seed, 0.1 * seed as f64 - 0.15);
        }
        let runs: Vec<&Path> = runs.iter().map(PathBuf::as_path).collect();
        check(&mut browser, &page(folder.path(), &runs), "several", 36);
    });
}

#[test]
fn the_keyboard_reaches_everything() {
    with_browser(|mut browser| {
        let folder = tempfile::tempdir().expect("folder");
        common::comparison(folder.path(), 20);
        let file = page(folder.path(), &[folder.path()]);
        let mut page = browser.open(&file, VIEWS[2]);
        let mut reached = Vec::new();
        for _ in 0..4 {
            page.press_tab();
            reached.push(page.evaluate("document.activeElement.getAttribute('aria-label') || document.activeElement.tagName"));
        }
        assert_eq!(reached, ["result", "paired differences", "SUMMARY", "SUMMARY"]);
        let outlined = page.evaluate("getComputedStyle(document.activeElement).outlineStyle");
        assert_eq!(outlined, "solid", "the focus can be seen");
    });
}

/// The checks above would notice.
#[test]
fn a_bad_page_is_caught() {
    with_browser(|mut browser| {
        let folder = tempfile::tempdir().expect("folder");
        let file = folder.path().join("bad.html");
        let bad = "<body><img src=http://127.0.0.1:9/x.png><video aria-label=broken src='data:video/mp4;base64,AAAA'></video>
            <p style='width: 3000px'>wide</p><svg><text font-size=4>tiny</text></svg><script>console.error('oh no')</script>";
        std::fs::write(&file, bad).expect("write");
        let mut page = browser.open(&file, VIEWS[0]);
        let wrong = page.evaluate(PLAY);
        assert!(wrong[0].as_str().is_some_and(|text| text.starts_with("broken: ")), "{wrong}");
        let misfits = page.evaluate(MISFITS).to_string();
        assert!(misfits.contains("the page is 30") && misfits.contains("too small"), "{misfits}");
        assert!(page.complaints().iter().any(|text| text.contains("oh no")));
        assert!(page.requests().iter().any(|address| address.starts_with("http://127.0.0.1:9/")));
    });
}

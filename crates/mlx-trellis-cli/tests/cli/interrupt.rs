//! `trellis quantize` that is killed, refused or out of space: nothing half-written, and nothing lost that was finished.

use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use rand::rngs::SmallRng;
use rand::{Rng, SeedableRng};

use super::quantize::{files, model, names, s};
use super::{fails, json as run, text};

#[test]
fn killed_at_random_moments_it_resumes_to_the_same_bytes() {
    let folder = tempfile::tempdir().unwrap();
    let source = model(folder.path(), 6);
    let whole = folder.path().join("whole");
    let args = |output: &Path| {
        let all = ["quantize", s(&source), "-o", s(output), "--max-shard-bytes", "100000", "--overwrite"];
        all.map(str::to_owned)
    };
    let start = Instant::now();
    run(&[&args(&whole).each_ref().map(String::as_str)[..], &["--json"]].concat());
    let took = start.elapsed();
    let expected = files(&whole);
    assert!(expected.len() > 5, "several shards: {:?}", expected.keys());
    std::fs::remove_dir_all(&whole).unwrap();

    let mut rng = SmallRng::seed_from_u64(20);
    let (mut killed, mut resumed) = (0, 0);
    for trial in 0..20 {
        let output = folder.path().join("out");
        // Every other trial replaces an artifact, so that the destination is never empty.
        if trial % 2 == 0 {
            let _ = std::fs::remove_dir_all(&output);
        }
        let mut child = Command::new(env!("CARGO_BIN_EXE_trellis"))
            .args(args(&output))
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        std::thread::sleep(Duration::from_secs_f64(took.as_secs_f64() * rng.random_range(0.0..1.1)));
        child.kill().unwrap();
        killed += usize::from(!child.wait().unwrap().success());
        let report = run(&[&args(&output).each_ref().map(String::as_str)[..], &["--json"]].concat());
        resumed += usize::from(report["resumed"].as_u64().unwrap() > 0);
        assert_eq!(files(&output), expected, "trial {trial}");
        assert_eq!(names(folder.path()), ["dense", "out"], "trial {trial} left something behind");
    }
    println!("{killed} of 20 killed before the end, {resumed} resumed from finished tensors");
    assert!(killed >= 10 && resumed >= 3, "{killed} killed, {resumed} resumed: the moments say nothing");
}

/// Starts a run and kills it once it has finished some tensors.
fn interrupt(args: &[&str], work: &Path) {
    let mut child = Command::new(env!("CARGO_BIN_EXE_trellis"))
        .args(args)
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    let start = Instant::now();
    while !work.join("00002.json").exists() {
        assert!(start.elapsed() < Duration::from_secs(60), "no tensor was finished");
        assert!(child.try_wait().unwrap().is_none(), "it ended too soon");
        std::thread::sleep(Duration::from_millis(2));
    }
    child.kill().unwrap();
    child.wait().unwrap();
}

#[test]
fn an_interrupted_plan_is_not_mixed_with_another() {
    let folder = tempfile::tempdir().unwrap();
    let source = model(folder.path(), 12);
    let output = folder.path().join("out");
    let work = folder.path().join(".out.quantize");
    let three = ["quantize", s(&source), "-o", s(&output), "--bits", "3"];
    interrupt(&three, &work);
    assert!(!output.exists());
    let two = ["quantize", s(&source), "-o", s(&output), "--bits", "2"];
    let error = fails(&two);
    assert!(error.contains("another plan") && error.contains("bits: 3 there, 2 here"), "{error}");
    assert!(error.contains("--restart"), "{error}");

    // A source that changed is another plan too.
    let companion = source.join("tokenizer.json");
    std::fs::write(&companion, "{\"a\": 1}").unwrap();
    assert!(fails(&three).contains("tokenizer.json"));
    std::fs::remove_file(&companion).unwrap();

    // A tensor without its record, or with half of it, counts as not begun.
    let report = run(&[&two[..], &["--restart", "--json"]].concat());
    assert_eq!(report["resumed"], 0);
    assert_eq!(names(folder.path()), ["dense", "out"]);
    let again = folder.path().join("again");
    run(&["quantize", s(&source), "-o", s(&again), "--bits", "2", "--json"]);
    assert_eq!(files(&output), files(&again));
}

#[test]
fn two_runs_do_not_share_a_destination() {
    let folder = tempfile::tempdir().unwrap();
    let source = model(folder.path(), 1);
    let work = folder.path().join(".out.quantize");
    std::fs::create_dir(&work).unwrap();
    let lock = std::fs::File::create(work.join("lock")).unwrap();
    lock.lock().unwrap();
    let output = folder.path().join("out");
    let error = fails(&["quantize", s(&source), "-o", s(&output)]);
    assert!(error.contains("another process"), "{error}");
    drop(lock);
    run(&["quantize", s(&source), "-o", s(&output), "--json"]);
    assert!(!work.exists());
}

#[test]
fn a_source_that_cannot_be_read_publishes_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let source = model(folder.path(), 2);
    let output = folder.path().join("out");
    let second = names(&source).into_iter().find(|n| n.starts_with("model-00002-of")).unwrap();
    let shard = source.join(&second);
    let whole = std::fs::read(&shard).unwrap();
    let refused = |expected: &[&str]| {
        let error = fails(&["quantize", s(&source), "-o", s(&output)]);
        assert!(expected.iter().all(|e| error.contains(e)), "{expected:?}: {error}");
        assert_eq!(names(folder.path()), ["dense"], "nothing is left");
    };
    std::fs::write(&shard, &whole[..whole.len() - 1000]).unwrap();
    refused(&[&second, "bytes of data", "expected the header's"]);
    std::fs::remove_file(&shard).unwrap();
    refused(&[&second, "no such file"]);
    std::fs::create_dir(&shard).unwrap();
    refused(&[&second]);
    std::fs::remove_dir(&shard).unwrap();
    std::fs::write(&shard, &whole).unwrap();
    for config in ["{", "[]", r#"{"quantization": 3}"#] {
        std::fs::write(source.join("config.json"), config).unwrap();
        refused(&["config.json", ""]);
    }
}

/// A limit on the size of files stands for a full disk: the same path, an error of write(2).
#[cfg(unix)]
#[test]
fn a_write_that_fails_publishes_nothing_and_can_be_gone_on_with() {
    let folder = tempfile::tempdir().unwrap();
    let source = model(folder.path(), 2);
    let output = folder.path().join("out");
    let limited = |kilobytes: u32| {
        // The signal that comes with the error is ignored, as for a full disk there is none.
        let script = format!("trap '' XFSZ; ulimit -f {kilobytes}; exec \"$0\" \"$@\"");
        let shell = Command::new("bash")
            .args(["-c", &script, env!("CARGO_BIN_EXE_trellis"), "quantize", s(&source), "-o", s(&output)])
            .output()
            .unwrap();
        assert_eq!(shell.status.code(), Some(2), "{}", text(&shell.stderr));
        text(&shell.stderr)
    };
    // In a tensor's own file, and in the artifact, once all tensors are finished.
    let error = limited(10);
    assert!(error.contains("cannot write") && !output.exists(), "{error}");
    assert_eq!(names(folder.path()), ["dense"], "nothing is left of no finished tensor");
    let error = limited(60);
    assert!(error.contains("cannot write") && error.contains("finished tensors are kept"), "{error}");
    assert_eq!(names(folder.path()), [".out.quantize", "dense"]);
    let report = run(&["quantize", s(&source), "-o", s(&output), "--json"]);
    assert_eq!(report["resumed"], 6);
    assert_eq!(names(folder.path()), ["dense", "out"]);
}

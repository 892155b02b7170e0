//! The suites `cpu` and `latency` on layers small enough for a test.

use std::{
    collections::BTreeSet,
    time::{Duration, Instant},
};

use crate::support::{self, Ran, bench, run};
use serde_json::Value;

const SMALL: [&str; 7] = ["cpu", "--shape", "96x64", "--threads", "1", "--seconds", "0.01"];

fn contenders(rows: &[Value], dtype: &str) -> BTreeSet<String> {
    let of_dtype = rows.iter().filter(|row| row["dtype"] == dtype);
    of_dtype.map(|row| row["contender"].as_str().unwrap().to_owned()).collect()
}

#[test]
fn every_kernel_appears_with_every_figure() {
    let dir = tempfile::tempdir().unwrap();
    let ran = run(dir.path(), &[&SMALL[..], &["--tokens", "1,32", "--json", "-o", "cpu.json"]].concat()).good();
    let answer = ran.json();
    assert_eq!(std::fs::read_to_string(dir.path().join("cpu.json")).unwrap(), ran.stdout);
    assert_eq!(answer["command"], "twofour-bench cpu --threads 1 --shape 96x64 --tokens 1,32 --seconds 0.01");
    assert_eq!(answer["machine"]["threads"], 1);
    assert!(answer["load_average"].is_f64() || !cfg!(target_os = "linux"), "{answer}");
    let read = &answer["read_bandwidth"][0];
    assert!(read["threads"] == 1 && read["gb_per_s"].as_f64().unwrap() > 0.0, "{read}");

    let rows = answer["rows"].as_array().unwrap();
    let set = |names: &[&str]| names.iter().map(|name| name.to_string()).collect::<BTreeSet<_>>();
    assert_eq!(contenders(rows, "f32"), set(&["twofour 2:4", "twofour dense", "gemm"]));
    assert_eq!(contenders(rows, "bf16"), set(&["twofour 2:4", "twofour 2:4 f32", "twofour dense"]));
    assert_eq!(contenders(rows, "i8"), set(&["twofour 2:4", "twofour 2:4 f32", "twofour dense"]));
    // In f32 only prefill is measured beside the smaller dtypes.
    assert_eq!(rows.len(), 2 * (3 + 2 + 2) + 2);
    for row in rows {
        let decode = row["tokens"] == 1;
        assert_eq!(row["work"], if decode { "decode" } else { "prefill" });
        assert_eq!((&row["shape"][0], &row["shape"][1], &row["threads"]), (&96.into(), &64.into(), &1.into()));
        let number = |key: &str| row[key].as_f64().unwrap_or_else(|| panic!("{key}: {row}"));
        assert!(0.0 < number("min_us") && number("min_us") <= number("median_us"), "{row}");
        assert!(number("median_us") <= number("max_us") && number("rounds") >= 5.0, "{row}");
        let gb_per_s = number("weight_bytes") / number("median_us") * 1e-3;
        // Times are whole nanoseconds.
        assert!((number("gb_per_s") / gb_per_s - 1.0).abs() < 0.01, "{row}");
        assert!((1.5..1.9).contains(&number("byte_limit")), "{row}");
        assert_eq!(row["read_share"].is_null(), !decode, "{row}");
        if decode {
            assert!((number("read_share") - number("gb_per_s") / number("read_gb_per_s")).abs() < 1e-9, "{row}");
        }
    }
}

#[test]
fn int4_is_interleaved_with_int8() {
    let dir = tempfile::tempdir().unwrap();
    let answer = run(dir.path(), &[&SMALL[..], &["--tokens", "1", "--dtype", "int4", "--json"]].concat()).good().json();
    let rows = answer["rows"].as_array().unwrap();
    let expected = ["twofour 2:4", "twofour 2:4 i8", "twofour dense"].map(str::to_owned);
    assert_eq!(contenders(rows, "int4"), BTreeSet::from(expected));
    let bytes = |who: &str| rows.iter().find(|row| row["contender"] == who).unwrap()["weight_bytes"].as_u64().unwrap();
    assert!(bytes("twofour 2:4") < bytes("twofour 2:4 i8") && bytes("twofour 2:4 i8") < bytes("twofour dense"));
}

#[test]
fn the_table_names_the_work() {
    let dir = tempfile::tempdir().unwrap();
    let arguments = ["--tokens", "1,32", "--dtype", "f16", "--only", "decode"];
    let text = run(dir.path(), &[&SMALL[..], &arguments].concat()).good().stdout;
    assert!(text.contains("decode/f16/96x64/1") && text.contains("GB/s"), "{text}");
    assert!(!text.contains("prefill/"), "{text}");
}

#[test]
fn latencies_are_told_for_one_thread_and_for_several() {
    let dir = tempfile::tempdir().unwrap();
    let arguments = ["latency", "--shape", "96x64", "--dtype", "bf16", "--seconds", "0.01"];
    let ran = run(dir.path(), &[&arguments[..], &["--json", "-o", "latency.json"]].concat()).good();
    let answer = ran.json();
    assert_eq!(std::fs::read_to_string(dir.path().join("latency.json")).unwrap(), ran.stdout);
    let command = "twofour-bench latency --dtype bf16 --shape 96x64 --seconds 0.01";
    assert_eq!(answer["command"], command);
    let rows = answer["rows"].as_array().unwrap();
    let several = &answer["machine"]["threads"];
    let found: Vec<_> = rows.iter().map(|row| (&row["between"], &row["threads"], &row["tokens"])).collect();
    let one = Value::from(1);
    let wanted = |between| [(between, &one, &one), (between, several, &one)];
    let [back_to_back, pauses] = ["back-to-back", "pauses"].map(Value::from);
    assert_eq!(found, [wanted(&back_to_back), wanted(&pauses)].concat());
    for row in rows {
        let number = |key: &str| row[key].as_f64().unwrap_or_else(|| panic!("{key}: {row}"));
        assert!(number("calls") >= 300.0 && 0.0 < number("p50_us") && number("p50_us") <= number("p90_us"), "{row}");
        assert!(number("p90_us") <= number("p99_us") && number("p99_us") <= number("max_us"), "{row}");
    }
    let text = run(dir.path(), &arguments).good().stdout;
    assert!(text.contains("decode/bf16/96x64/1") && text.contains("back to back") && text.contains("30 us"), "{text}");
}

#[test]
fn what_is_asked_wrongly_is_told_before_anything_is_measured() {
    let dir = tempfile::tempdir().unwrap();
    let old = dir.path().join("old.json");
    std::fs::write(&old, "old").unwrap();
    for (arguments, wanted) in [
        (&["--only", "nonsense"][..], "decode/f32/14336x4096/1"),
        (&["--threads", "4096"], "hardware thread"),
        (&["--seconds=-1"], "--seconds"),
        (&["--seconds", "nan"], "--seconds"),
        (&["-o", "old.json"], "--force"),
        (&["-o", "."], "directory"),
    ] {
        let message = run(dir.path(), &[&["cpu"], arguments].concat()).bad(2);
        assert!(message.contains(wanted), "{message}");
    }
    let message = run(dir.path(), &["cpu", "-o", "missing/cpu.json"]).bad(1);
    assert!(message.contains("missing/cpu.json"), "{message}");
    let output = bench().args(SMALL).env("TWOFOUR_ENGINE", "warp").current_dir(dir.path()).output().unwrap();
    assert!(Ran::from(output).bad(1).contains("`warp`"));
    assert_eq!(std::fs::read_to_string(&old).unwrap(), "old");
    assert_eq!(support::names(dir.path()), ["old.json"]);
}

#[cfg(unix)]
#[test]
fn a_link_or_device_in_the_outputs_place_is_refused_and_stays() {
    let dir = tempfile::tempdir().unwrap();
    for (i, target) in ["other", "/dev/null", "/dev/stdout"].iter().enumerate() {
        let link = format!("link{i}.json");
        std::os::unix::fs::symlink(target, dir.path().join(&link)).unwrap();
        for force in [&[][..], &["--force"]] {
            run(dir.path(), &[&SMALL[..], &["-o", &link], force].concat()).bad(2);
        }
        assert_eq!(std::fs::read_link(dir.path().join(&link)).unwrap(), std::path::Path::new(target));
    }
}

#[cfg(unix)]
#[test]
fn an_interrupt_ends_both_processes() {
    let dir = tempfile::tempdir().unwrap();
    let mut child = bench()
        .args(["cpu", "--shape", "96x64", "--seconds", "1000", "-o", "cpu.json"])
        .current_dir(dir.path())
        .stdout(std::process::Stdio::piped())
        .spawn()
        .unwrap();
    std::thread::sleep(Duration::from_millis(700));
    let killed = std::process::Command::new("kill").args(["-INT", &child.id().to_string()]).status().unwrap();
    assert!(killed.success());
    let begun = Instant::now();
    assert_eq!(child.wait().unwrap().code(), Some(130));
    assert!(begun.elapsed() < Duration::from_secs(20));
    assert!(support::names(dir.path()).is_empty());
}

//! Predictions: of models in all forms, and beside what was measured.

use crate::support::{Folder, run, succeed};
use serde_json::Value;
use std::path::Path;

fn plan(folder: &Folder, arguments: &str) -> Value {
    succeed(folder.path(), &format!("plan {arguments} --json")).json().remove(0)
}

/// Returns a number of one strategy's prediction.
fn number(plan: &Value, strategy: usize, name: &str) -> f64 {
    plan["predictions"][strategy][name].as_f64().unwrap_or_else(|| panic!("{name} of {plan}"))
}

const DENSE: usize = 0;
const GATHER: usize = 1;
const REDUCE: usize = 2;
const SHARDED: usize = 3;

#[test]
fn slow_links_want_compression_and_fast_ones_do_not_need_it() {
    let folder = Folder::new();
    let slow = plan(&folder, "resnet18 --learners 8 --bandwidth 100mbit --compute 0.3s");
    assert!(number(&slow, GATHER, "step") < 0.2 * number(&slow, DENSE, "step"), "{slow}");
    assert_ne!(slow["recommendation"], "dense");
    let fast = plan(&folder, "resnet18 --learners 8 --bandwidth 400gbit --compute 2s");
    assert_eq!(fast["recommendation"], "dense", "{fast}");
    // The ring of 11 million gradients.
    let ring = 2.0 * 7.0 / 8.0 * 4.0 * 11_173_962.0;
    assert!((number(&slow, DENSE, "bytes") / ring - 1.0).abs() < 1e-9);
    // Little to compute, much to send: it pays whatever the link, and what never does says so, too.
    let matrices = plan(&folder, "8192x8192 --learners 2 --compute 50ms");
    assert_eq!(matrices["predictions"][GATHER]["break_even"], "any", "{matrices}");
    assert_eq!(matrices["predictions"][DENSE]["break_even"], "never");
    let alone = plan(&folder, "resnet18 --learners 1 --compute 0.3s");
    assert_eq!(number(&alone, GATHER, "step"), 0.3);
    assert_eq!(alone["recommendation"], "dense");
}

#[test]
fn traffic_grows_with_learners_as_the_strategies_say() {
    let folder = Folder::new();
    let bytes = |learners: usize, strategy| {
        let plan = plan(&folder, &format!("4096x4096,4096 --learners {learners} --bandwidth 1gbit"));
        number(&plan, strategy, "bytes")
    };
    let growth = |strategy| bytes(10_000, strategy) / bytes(100, strategy);
    assert!((90.0..110.0).contains(&growth(GATHER)));
    // What is around the elements of a message is sent to each learner.
    assert!(growth(REDUCE) < 15.0 && growth(SHARDED) < 4.0);
    let table =
        succeed(folder.path(), "plan 1000x1000 --learners 128 --matrix-ratio 350 --json").json().remove(0);
    // Of one layer of a million elements, as the traffic benchmark counts them; its frame ratio is about 350.
    for (strategy, measured) in [(GATHER, 1_448_989.0), (REDUCE, 295_551.0), (SHARDED, 34_337.0)] {
        let predicted = number(&table, strategy, "bytes");
        assert!((0.8..1.25).contains(&(predicted / measured)), "{predicted} {measured}");
    }
}

/// Over 100 ms of round trip, what counts is how often learners exchange.
#[test]
fn local_steps_send_seldom() {
    let folder = Folder::new();
    let sites = "4096x4096,4096 --learners 4 --bandwidth 100mbit --latency 50ms --compute 0.5s";
    let (each, local) = (plan(&folder, sites), plan(&folder, &format!("{sites} --local-steps 30")));
    assert_eq!(each["predictions"].as_array().unwrap().len(), 4);
    assert_eq!(number(&each, DENSE, "step"), number(&local, DENSE, "step"));
    // With local steps all come after dense in every step.
    for strategy in [DENSE, GATHER, REDUCE, SHARDED] {
        assert_eq!(number(&local, 1 + strategy, "bytes"), number(&each, strategy, "bytes") / 30.0);
    }
    for strategy in [GATHER, REDUCE, SHARDED] {
        let [local, each] = [number(&local, 1 + strategy, "step"), number(&each, strategy, "step")];
        assert!(local < 0.55 && each > 0.7, "{local} {each}");
    }
    assert!(number(&local, 1 + DENSE, "step") > number(&local, 1 + GATHER, "step"));
    assert_eq!((&local["recommendation"], &local["recommended_local_steps"]), (&"gather".into(), &30.into()));
    // Where dense exchanges are as fast, nothing needs compression.
    let near =
        plan(&folder, "4096x4096,4096 --learners 4 --bandwidth 10gbit --compute 0.5s --local-steps 500");
    assert_eq!(near["recommendation"], "dense", "{near}");
    let sooner =
        plan(&folder, "4096x4096,4096 --learners 4 --bandwidth 100mbit --compute 0.5s --local-steps 500");
    assert_eq!(
        (&sooner["recommendation"], &sooner["recommended_local_steps"]),
        (&"dense".into(), &500.into())
    );
    let table = succeed(folder.path(), &format!("plan {sites} --local-steps 30")).stdout;
    assert!(
        table.contains("gather, 30 local steps") && table.contains("gather: with 30 local steps a step is"),
        "{table}"
    );
}

/// At break-even a step takes as long both ways.
#[test]
fn break_even_is_where_it_says() {
    let folder = Folder::new();
    let model = "4096x4096,4096 --learners 500 --compute 1s";
    let link = number(&plan(&folder, &format!("{model} --bandwidth 1gbit")), GATHER, "break_even");
    let ratio = |factor: f64| {
        let plan = plan(&folder, &format!("{model} --bandwidth {}kbit", factor * link / 125.0));
        number(&plan, GATHER, "step") / number(&plan, DENSE, "step")
    };
    assert!(ratio(0.9) < 1.0 && (0.99..1.01).contains(&ratio(1.0)) && ratio(1.1) > 1.0, "{link}");
}

#[test]
fn files_are_read_and_tables_are_printed() {
    let folder = Folder::new();
    succeed(folder.path(), "train digits --steps 2 --out run");
    let file = "run/checkpoint-00000002/weights.safetensors";
    let of_file = plan(&folder, &format!("{file} --learners 4"));
    let of_recipe = plan(&folder, "digits --learners 4");
    assert_eq!(of_file["model"]["elements"], of_recipe["model"]["elements"]);
    for (bytes, message) in [
        (&b"{}"[..], "is not a safetensors file"),
        (b"\x02\0\0\0\0\0\0\0{]", "is not a safetensors file"),
        (b"\x02\0\0\0\0\0\0\0{}", "no tensors of floating-point numbers"),
    ] {
        folder.write("bad.safetensors", bytes);
        let ended = run(folder.path(), "plan bad.safetensors");
        assert_eq!(ended.code, Some(2));
        assert!(ended.stderr.contains(message) && ended.stderr.lines().count() == 1, "{}", ended.stderr);
    }
    let table =
        succeed(folder.path(), "plan digits --learners 4 --bandwidth 10mbit --latency 1ms --compute 5ms");
    for part in [
        "digits: 0.1 million gradients",
        "4 learners, 10 Mbit links, 1.00 ms latency",
        "pays below",
        "--calibrate",
    ] {
        assert!(table.stdout.contains(part), "{part}\n{}", table.stdout);
    }
}

#[test]
fn this_machine_can_be_measured() {
    let folder = Folder::new();
    let ended = succeed(folder.path(), "plan --calibrate");
    assert!(
        ended.stdout.contains("to copy an element") && ended.stdout.contains("machine.json"),
        "{}",
        ended.stdout
    );
    let plan = plan(&folder, "digits");
    assert_eq!(plan["calibrated"], true);
    for part in ["copy", "large_bins", "small_bins", "write", "code", "byte", "transport"] {
        let seconds = plan["machine"][part].as_f64().unwrap();
        assert!((1e-12..1e-1).contains(&seconds), "{part}: {seconds}");
    }
    folder.write("cache/machine.json", b"{}");
    let ended = run(folder.path(), "plan digits");
    assert_eq!(ended.code, Some(2));
    assert!(
        ended.stderr.contains("machine.json is damaged: measure again with --calibrate"),
        "{}",
        ended.stderr
    );
}

/// The promise that is made for predictions, held to what the network benchmark measured. Given are what `plan --calibrate` found on
/// the machine of the benchmark, the time of a step without communication in each case, and the bytes of a message of each workload;
/// the rest is predicted.
#[test]
fn predictions_are_near_what_was_measured() {
    let results = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../reproduction/results");
    let text = std::fs::read_to_string(results.join("network.jsonl")).unwrap();
    let lines = text.lines().map(|line| serde_json::from_str(line).unwrap());
    // The others are of memory, of machines of several processes, and of sites far apart.
    let is_step = |line: &Value| {
        line["step_seconds"].is_number() && line["places"].is_null() && line["workload"] != "transformer"
    };
    let lines: Vec<Value> = lines.filter(is_step).collect();
    let folder = Folder::new();
    folder.write("cache/machine.json", &std::fs::read(results.join("machine.json")).unwrap());
    let mut checked = 0;
    for dense in lines.iter().filter(|line| line["method"] == "builtin") {
        let find = |link: &Value, method: &str| {
            let same = |line: &&Value| {
                line["link"] == *link
                    && line["method"] == method
                    && ["workload", "learners"].iter().all(|name| line[name] == dense[name])
            };
            lines.iter().find(same)
        };
        let seconds = |line: &Value| line["step_seconds"].as_f64().unwrap();
        let link = &dense["link"];
        let (Some(alone), Some(message)) = (find(link, "none"), find(&"unshaped".into(), "gather")) else {
            continue;
        };
        let (learners, elements) = (dense["learners"].as_f64().unwrap(), &dense["parameters"]);
        let ratio =
            4.0 * elements.as_f64().unwrap() * (learners - 1.0) / message["said_bytes"].as_f64().unwrap();
        let (shape, kind) =
            if dense["workload"] == "resnet18" { ("x1x1x1", "conv") } else { ("x1", "matrix") };
        let bandwidth = link.as_str().filter(|link| *link != "unshaped").unwrap_or("1e9gbit");
        let crowding = (learners / dense["cores"].as_f64().unwrap()).max(1.0);
        let plan = plan(
            &folder,
            &format!(
                "{elements}{shape} --{kind}-ratio {ratio} --learners {learners} --learners-per-core {crowding} \
                 --bandwidth {bandwidth} --latency 50us --compute {}s",
                seconds(alone)
            ),
        );
        for (strategy, method) in ["builtin", "gather", "reduce", "sharded"].into_iter().enumerate() {
            let Some(line) = find(link, method) else { continue };
            let predicted = number(&plan, strategy, "step");
            let error = predicted / seconds(line) - 1.0;
            // Faster links wait for processors, which differs more. At 10 Mbit short messages do not fill the link.
            let most = match plan["setting"]["bandwidth"].as_f64().unwrap() {
                bandwidth if bandwidth > 125e6 => 1.0,
                bandwidth if bandwidth > 1.25e6 => 0.3,
                _ => 0.45,
            };
            assert!(error.abs() <= most, "{error:+.2}: {line}");
            let measured_ratio = seconds(line) / seconds(dense);
            let predicted_ratio = predicted / number(&plan, DENSE, "step");
            assert!(measured_ratio < 1.1 || predicted_ratio >= 1.0, "{line}");
            assert!(measured_ratio > 1.0 / 1.1 || predicted_ratio <= 1.0, "{line}");
            checked += 1;
        }
    }
    assert!(checked >= 16, "{checked}");
}

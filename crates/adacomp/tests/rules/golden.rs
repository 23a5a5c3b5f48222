//! Frames that must never change, as files: other versions and other languages are compared with them.
//!
//! After a deliberate change of the format, `ADACOMP_WRITE_GOLDEN=1 cargo test` writes them anew.

use crate::support::{Random, gradients, has_packets, named, one_layer, small_model};
use adacomp::{
    Codec, Compressor, Form, Frame, FrameWriter, Header, Packet, Policy, Selected, Sparse, outline,
};
use std::path::PathBuf;

fn check(name: &str, bytes: &[u8]) {
    let path = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/golden").join(name);
    if std::env::var_os("ADACOMP_WRITE_GOLDEN").is_some() {
        std::fs::write(&path, bytes).unwrap();
    }
    let golden = std::fs::read(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    assert!(bytes == golden, "{name} has changed: {} bytes, was {}", bytes.len(), golden.len());
}

#[test]
fn frames_have_not_changed() {
    for (scheme, policy, form) in [
        ("adacomp", Policy::adacomp(), Form::Selected),
        ("local-selection", Policy::local_selection(), Form::Selected),
        ("top-k", Policy::top_k(1.0), Form::Selected),
        ("half", Policy::half(), Form::Half),
        ("dense", Policy::dense(), Form::Dense),
    ] {
        let layout = small_model(policy);
        let mut random = Random(51);
        let mut compressor = Compressor::new(layout.clone());
        let mut bytes = Vec::new();
        for step in 0..3 {
            compressor.compress(&named(&layout, &gradients(&layout, &mut random))).unwrap();
            for codec in [Codec::Paper, Codec::Rice] {
                compressor.encode(codec, 7, step, &mut bytes).unwrap();
                if step == 2 {
                    check(&format!("{scheme}.{codec}.frame"), &bytes);
                }
                let mut frame = Frame::default();
                frame.decode(&bytes, &layout).unwrap();
                assert!(has_packets(&frame, (0..3).map(|layer| (layer, compressor.packet(layer).unwrap()))));
                let (header, sections) = outline(&bytes).unwrap();
                assert_eq!(Some(header), frame.header());
                assert!(frame.sections().eq(sections.iter().copied()));
                assert_eq!(sections[0].form, form);
                assert!((0..bytes.len()).all(|end| outline(&bytes[..end]).is_err()));
            }
            compressor.commit().unwrap();
        }
    }
    // What a learner sends whose gradient is not finite.
    let layout = small_model(Policy::adacomp());
    let mut compressor = Compressor::new(layout.clone());
    let mut gradients = gradients(&layout, &mut Random(52));
    gradients[0][5] = f32::INFINITY;
    compressor.compress(&named(&layout, &gradients)).unwrap();
    let mut bytes = Vec::new();
    compressor.encode(Codec::Rice, 7, 2, &mut bytes).unwrap();
    check("non-finite.frame", &bytes);
}

/// The worked example of `docs/wire-format.md` is what the code writes.
#[test]
fn the_documented_example_is_true() {
    let layout = one_layer(250, 50);
    let elements = [(3, false), (49, true), (200, false), (203, false)];
    let selected = elements.map(|(index, negative)| Selected::new(index, negative));
    let document = include_str!("../../../../docs/wire-format.md");
    for codec in [Codec::Rice, Codec::Paper] {
        let header =
            Header { codec, non_finite: false, fingerprint: layout.fingerprint(), step: 3, learner: 1 };
        let mut bytes = Vec::new();
        let mut writer = FrameWriter::new(&header, &layout, &mut bytes);
        writer.section(0, Packet::Sparse(Sparse { values: [0.5, -0.5], selected: &selected }));
        writer.finish();
        let start = format!("```hex {codec}\n");
        let (_, after) = document.split_once(&start).expect("an example of this codec");
        let (example, _) = after.split_once("```").expect("the end of the example");
        // Each line: bytes, then words about them behind a `|`.
        let documented = example.lines().map(|line| line.split('|').next().unwrap_or_default().trim());
        let documented: Vec<&str> = documented.flat_map(str::split_whitespace).collect();
        let written: Vec<String> = bytes.iter().map(|byte| format!("{byte:02x}")).collect();
        assert_eq!(documented, written);
    }
}

//! Any bytes give a frame or an error, what decodes survives being encoded again, and an average of it is what it says.
//!
//! The first byte picks the policy, the rest is a frame. Its fingerprint and checksum are made to fit, so that the fuzzer
//! gets past them.
#![no_main]

use adacomp::{AverageError, Averager, Frame, FrameWriter, Header, Layout, Parameter, Policy};
use adacomp_fuzz::fix_frame;
use libfuzzer_sys::fuzz_target;
use std::cell::RefCell;

/// The model of the golden frames, which are the seeds.
fn layouts() -> Vec<Layout> {
    let policies =
        [Policy::adacomp(), Policy::top_k(1.0), Policy::half(), Policy::dense(), Policy::local_selection()];
    let parameters = [
        Parameter::new("conv.weight", &[16, 8, 3, 3]),
        Parameter::new("fc.weight", &[40, 60]),
        Parameter::new("fc.bias", &[40]),
    ];
    policies.iter().map(|policy| policy.layout(parameters.clone()).unwrap()).collect()
}

thread_local! {
    static KEPT: RefCell<(Vec<Layout>, Frame, Frame)> =
        RefCell::new((layouts(), Frame::default(), Frame::default()));
}

fuzz_target!(|data: &[u8]| {
    let Some((&policy, bytes)) = data.split_first() else { return };
    KEPT.with_borrow_mut(|(layouts, frame, again)| {
        let layout = &layouts[policy as usize % layouts.len()];
        let _ = frame.decode(bytes, layout);
        if bytes.len() < Header::LENGTH + 4 {
            return;
        }
        let mut bytes = bytes.to_vec();
        fix_frame(&mut bytes, Some(layout));
        let decoded = frame.decode(&bytes, layout);
        let mut averager = Averager::new(layout.clone());
        let step = decoded.as_ref().map_or(0, |header| header.step);
        match averager.check(step, &[&bytes]) {
            Err(AverageError::Frame { source, .. }) => assert_eq!(decoded, Err(source)),
            _ => assert!(decoded.is_ok()),
        }
        let Ok(header) = decoded else { return };
        let mut average: Vec<_> = layout.layers().iter().map(|layer| vec![0.0; layer.elements()]).collect();
        let averaged =
            averager.write(&mut average.iter_mut().map(Vec::as_mut_slice).collect::<Vec<_>>()).is_ok();
        assert_eq!(averaged, header.learner == 0 && !header.non_finite);
        let mut written = Vec::new();
        let mut writer = FrameWriter::new(&header, layout, &mut written);
        let (mut values, mut selected) = (Vec::new(), Vec::new());
        for (position, layer) in frame.sections().map(|section| section.layer).enumerate() {
            let packet = frame.packet(position, &mut values, &mut selected);
            let mut output = vec![0.0; layout[layer].elements()];
            packet.add_to(&mut output);
            assert!(output.iter().all(|value| value.is_finite()));
            assert!(!averaged || output == average[layer]);
            writer.section(layer, packet);
        }
        writer.finish();
        assert_eq!(again.decode(&written, layout), Ok(header));
        assert_eq!(frame.sections().len(), again.sections().len());
        for position in 0..frame.sections().len() {
            let (mut other_values, mut other_selected) = (Vec::new(), Vec::new());
            let other = again.packet(position, &mut other_values, &mut other_selected);
            assert_eq!(frame.packet(position, &mut values, &mut selected), other);
        }
        assert!(written.len() <= bytes.len(), "a frame that is longer than it needs to be was accepted");
    });
});

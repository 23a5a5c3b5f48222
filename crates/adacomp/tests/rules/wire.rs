//! Every rule of the wire format, broken once.

use crate::support::{Random, gradients, has_packets, named, one_layer, small_model};
use adacomp::internal::encode_range;
use adacomp::{
    AverageError, Averager, Codec, CompressError, Compressor, DecodeError, Frame, FrameWriter, Header,
    Layout, Packet, Parameter, Policy, Selected, Sparse, section_bytes,
};

/// A frame of one layer with these elements.
fn frame(layout: &Layout, codec: Codec, values: [f32; 2], elements: &[(u32, bool)]) -> Vec<u8> {
    let selected: Vec<_> = elements.iter().map(|&(index, negative)| Selected::new(index, negative)).collect();
    let header = Header { codec, non_finite: false, fingerprint: layout.fingerprint(), step: 3, learner: 1 };
    let mut bytes = Vec::new();
    let mut writer = FrameWriter::new(&header, layout, &mut bytes);
    writer.section(0, Packet::Sparse(Sparse { values, selected: &selected }));
    writer.finish();
    bytes
}

/// Replaces everything behind the header, with a checksum that fits.
fn with_body(frame: &[u8], sections: u32, body: &[u8]) -> Vec<u8> {
    let mut bytes = frame[..28].to_vec();
    bytes.extend_from_slice(&sections.to_le_bytes());
    bytes.extend_from_slice(body);
    sealed(bytes)
}

fn sealed(mut bytes: Vec<u8>) -> Vec<u8> {
    let checksum = crc32(&bytes);
    bytes.extend_from_slice(&checksum.to_le_bytes());
    bytes
}

/// CRC-32 bit by bit, as the specification describes it.
pub(crate) fn crc32(bytes: &[u8]) -> u32 {
    !bytes.iter().fold(!0, |crc, &byte| {
        (0..8).fold(
            crc ^ u32::from(byte),
            |crc, _| if crc & 1 == 1 { crc >> 1 ^ 0xedb8_8320 } else { crc >> 1 },
        )
    })
}

/// What reading a frame says, which is also what checking it for an average says.
fn decode(bytes: &[u8], layout: &Layout) -> Result<Header, DecodeError> {
    let mut frame = Frame::default();
    let result = frame.decode(bytes, layout);
    let checked = Averager::new(layout.clone()).check(3, &[bytes]);
    match checked {
        Err(AverageError::Frame { source, .. }) => assert_eq!(result, Err(source)),
        _ => assert!(result.is_ok(), "{checked:?}"),
    }
    assert_eq!(frame.header().is_some(), result.is_ok());
    assert!(result.is_ok() || frame.sections().len() == 0);
    result
}

/// A section of layer 0 with selected elements: a scale of 1, then these bytes.
fn selection(codec_bytes: &[u8]) -> Vec<u8> {
    [&[0, 2, 4 + codec_bytes.len() as u8], &1.0f32.to_le_bytes()[..], codec_bytes].concat()
}

#[test]
fn headers_are_checked() {
    let layout = one_layer(100, 50);
    let good = frame(&layout, Codec::Rice, [1.0, -1.0], &[(3, false)]);
    assert!(decode(&good, &layout).is_ok());
    let changed = |at: usize, byte: u8| {
        let mut bytes = good[..good.len() - 4].to_vec();
        bytes[at] = byte;
        decode(&sealed(bytes), &layout).unwrap_err()
    };
    assert_eq!(changed(0, b'B'), DecodeError::Magic { actual: *b"BDAC" });
    assert_eq!(changed(4, 2), DecodeError::Version { expected: 1, actual: 2 });
    assert_eq!(changed(5, 0), DecodeError::Codec { actual: 0 });
    assert_eq!(changed(6, 2), DecodeError::Flags { actual: 2 });
    assert_eq!(changed(7, 1), DecodeError::Flags { actual: 0x100 });
    assert!(matches!(changed(8, good[8] ^ 1), DecodeError::Fingerprint { .. }));
    assert_eq!(changed(28, 0), DecodeError::Sections { expected: 1, actual: 0 });
    assert_eq!(changed(28, 2), DecodeError::Sections { expected: 1, actual: 2 });
    assert_eq!(changed(32, 1), DecodeError::Layer { position: 0, expected: 0, actual: 1 });
    assert_eq!(changed(33, 1), DecodeError::Form { layer: 0, form: 1 });
    assert_eq!(changed(33, 9), DecodeError::Form { layer: 0, form: 9 });
}

#[test]
fn every_damaged_bit_and_every_cut_is_found() {
    for codec in [Codec::Paper, Codec::Rice] {
        let layout = one_layer(100, 50);
        let good = frame(&layout, codec, [1.0, -1.0], &[(3, false), (60, true), (61, false)]);
        for bit in 0..8 * good.len() {
            let mut bytes = good.clone();
            bytes[bit / 8] ^= 1 << (bit % 8);
            assert!(decode(&bytes, &layout).is_err(), "bit {bit}");
        }
        for length in 0..good.len() {
            assert!(decode(&good[..length], &layout).is_err(), "length {length}");
        }
        assert!(matches!(
            decode(&[good.as_slice(), &[0]].concat(), &layout),
            Err(DecodeError::Checksum { .. })
        ));
    }
}

#[test]
fn sections_are_checked() {
    let layout = one_layer(100, 50);
    let good = frame(&layout, Codec::Rice, [1.0, -1.0], &[(3, false)]);
    let body = &good[32..good.len() - 4];
    let case = |sections: u32, body: &[u8]| decode(&with_body(&good, sections, body), &layout).unwrap_err();
    assert_eq!(case(1, &[]), DecodeError::Truncated { part: "a layer number" });
    assert_eq!(case(1, &[0]), DecodeError::Truncated { part: "a section form" });
    assert_eq!(case(1, &[0, 2]), DecodeError::Truncated { part: "a section length" });
    assert_eq!(case(1, &[0, 2, 9, 0]), DecodeError::Truncated { part: "a section" });
    assert_eq!(case(1, &[0x80, 0, 2]), DecodeError::Varint { part: "a layer number" });
    assert_eq!(case(1, &[0xff, 0xff, 0xff, 0xff, 0x7f]), DecodeError::Varint { part: "a layer number" });
    assert_eq!(case(1, &[0x80, 0x80, 0x80, 0x80, 0x80, 1]), DecodeError::Varint { part: "a layer number" });
    assert_eq!(
        case(1, &[body, &[0, 0]].concat()),
        DecodeError::Trailing { part: "the last section", count: 2 }
    );
    assert_eq!(case(1, &[0, 2, 3, 0, 0, 0]), DecodeError::Truncated { part: "a scale" });
    let dense = DecodeError::Length { layer: 0, part: "a dense section", expected: 400, actual: 4 };
    assert_eq!(case(1, &[0, 0, 4, 0, 0, 0, 0]), dense);
    for scale in [f32::NAN, f32::INFINITY, -1.0, -0.0] {
        let body = [&[0, 2, 5], &scale.to_le_bytes()[..], &[0]].concat();
        assert_eq!(case(1, &body), DecodeError::Value { layer: 0 });
    }
    let mut values = vec![0.0f32; 100];
    values[99] = f32::NAN;
    let dense =
        [&[0, 0, 0x90, 3][..], &values.iter().flat_map(|value| value.to_le_bytes()).collect::<Vec<_>>()];
    assert_eq!(case(1, &dense.concat()), DecodeError::Value { layer: 0 });
}

#[test]
fn rice_selections_are_checked() {
    let layout = one_layer(100, 50);
    let good = frame(&layout, Codec::Rice, [1.0, -1.0], &[(3, false)]);
    let case = |bytes: &[u8]| decode(&with_body(&good, 1, &selection(bytes)), &layout);
    assert!(case(&[0]).is_ok());
    // Parameter 2; codes of one, sign, two bits of remainder.
    assert!(case(&[1, 2, 0b1101]).is_ok());
    assert_eq!(case(&[]), Err(DecodeError::Truncated { part: "a count" }));
    assert_eq!(case(&[0, 0]), Err(DecodeError::Trailing { part: "an empty selection", count: 1 }));
    assert_eq!(case(&[1]), Err(DecodeError::Truncated { part: "a rice parameter" }));
    assert_eq!(case(&[1, 31, 1]), Err(DecodeError::RiceParameter { layer: 0, actual: 31 }));
    assert_eq!(case(&[3, 2, 0b1101]), Err(DecodeError::Count { layer: 0, count: 3, most: 2 }));
    assert_eq!(case(&[101, 0, 0, 0, 0]), Err(DecodeError::Count { layer: 0, count: 101, most: 16 - 4 }));
    assert_eq!(case(&[1, 2, 0]), Err(DecodeError::Truncated { part: "selected elements" }));
    assert_eq!(case(&[1, 2, 0b1000_0000]), Err(DecodeError::Truncated { part: "selected elements" }));
    assert_eq!(case(&[1, 2, 0b1_1101]), Err(DecodeError::Trailing { part: "selected elements", count: 0 }));
    assert_eq!(case(&[1, 2, 0b1101, 0]), Err(DecodeError::Trailing { part: "selected elements", count: 1 }));
    // 100 zeros and a one: index 100 of 100.
    let mut far = vec![0; 13];
    far[12] = 0b1_0000;
    assert_eq!(case(&[&[1, 0][..], &far].concat()), Err(DecodeError::Index { layer: 0 }));
    far[12] = 0b1000;
    assert!(case(&[&[1, 0][..], &far].concat()).is_ok());
    // A remainder that leads out of the layer.
    assert_eq!(case(&[1, 7, 0b1111_1101, 1]), Err(DecodeError::Index { layer: 0 }));
}

#[test]
fn paper_selections_are_checked() {
    // Bins of 50, 50 and 20: words of 8 bits, the last index 49.
    let layout = one_layer(120, 50);
    let good = frame(&layout, Codec::Paper, [1.0, -1.0], &[(3, false)]);
    let case = |bytes: &[u8]| decode(&with_body(&good, 1, &selection(bytes)), &layout);
    let (sign, last) = (0x40, 0x80);
    let index = Err(DecodeError::Index { layer: 0 });
    let truncated = Err(DecodeError::Truncated { part: "selected elements" });
    assert!(case(&[]).is_ok());
    assert!(case(&[3, 7 | sign, 49 | last, 49, 19 | last]).is_ok());
    assert!(case(&[49 | sign, 1, last]).is_ok());
    assert_eq!(case(&[3]), truncated);
    assert_eq!(case(&[3, 3 | last]), index);
    assert_eq!(case(&[50 | last]), index);
    assert_eq!(case(&[63]), index);
    assert_eq!(case(&[3, 49]), index);
    assert_eq!(case(&[49]), truncated);
    assert_eq!(case(&[49 | sign]), truncated);
    assert_eq!(case(&[49, 49, last]), index);
    assert_eq!(case(&[49 | sign, 0, last]), index);
    assert_eq!(case(&[49 | sign, 1, 20 | last]), index);
    assert_eq!(case(&[49 | sign, 2, last]), index);
    assert_eq!(case(&[last, last, last, last]), index);

    let wide = one_layer(40_000, 16_384);
    let good = frame(&wide, Codec::Paper, [1.0, -1.0], &[(3, false), (16_383, true), (39_999, true)]);
    assert!(decode(&good, &wide).is_ok());
    assert_eq!(decode(&with_body(&good, 1, &selection(&[0, 0x80, 1])), &wide), truncated);
}

#[test]
fn frames_of_some_layers_are_told_from_whole_ones() {
    let layout = small_model(Policy::adacomp());
    let mut compressor = Compressor::new(layout.clone());
    compressor.compress(&named(&layout, &gradients(&layout, &mut Random(41)))).unwrap();
    let (mut whole, mut part) = (Vec::new(), Vec::new());
    compressor.encode(Codec::Rice, 0, 0, &mut whole).unwrap();
    compressor.encode_layers(Codec::Rice, 0, 0, &[0, 2], &mut part).unwrap();
    let mut frame = Frame::default();
    assert!(frame.decode_layers(&part, &layout, &[0, 2]).is_ok());
    assert!(has_packets(&frame, [0, 2].map(|layer| (layer, compressor.packet(layer).unwrap()))));
    assert_eq!(frame.decode(&part, &layout), Err(DecodeError::Sections { expected: 3, actual: 2 }));
    let refused = frame.decode_layers(&part, &layout, &[0, 1]);
    assert_eq!(refused, Err(DecodeError::Layer { position: 1, expected: 1, actual: 2 }));
    for (bytes, layers) in [(&part, &[0][..]), (&whole, &[0, 2])] {
        assert!(matches!(frame.decode_layers(bytes, &layout, layers), Err(DecodeError::Sections { .. })));
    }
}

#[test]
fn a_learner_number_has_32_bits_on_the_wire() {
    let layout = small_model(Policy::adacomp());
    let mut compressor = Compressor::new(layout.clone());
    compressor.compress(&named(&layout, &gradients(&layout, &mut Random(43)))).unwrap();
    let (last, mut bytes) = (u32::MAX as usize, Vec::new());
    compressor.encode(Codec::Rice, last, 0, &mut bytes).unwrap();
    assert_eq!(Frame::default().decode(&bytes, &layout).unwrap().learner, last);
    let refused = compressor.encode(Codec::Rice, last + 1, 0, &mut bytes);
    assert_eq!(refused, Err(CompressError::Learner { learner: last + 1 }));
}

#[test]
fn what_is_wrong_with_a_frame_is_the_source_of_the_error() {
    let layout = small_model(Policy::adacomp());
    let error = Averager::new(layout).check(0, &[b"nothing"]).unwrap_err();
    let source = std::error::Error::source(&error).and_then(|source| source.downcast_ref::<DecodeError>());
    assert_eq!(source, Some(&DecodeError::Truncated { part: "the header" }));
}

#[test]
fn top_k_means_must_have_their_signs() {
    let layout = Policy::top_k(10.0).layout([Parameter::new("weight", &[40, 50])]).unwrap();
    for (values, valid) in [
        ([1.0, -2.0], true),
        ([0.0, -2.0], true),
        ([1.0, 0.0], true),
        ([1.0, 2.0], false),
        ([-1.0, -2.0], false),
    ] {
        for codec in [Codec::Paper, Codec::Rice] {
            let bytes = frame(&layout, codec, values, &[(3, false), (1999, true)]);
            assert_eq!(decode(&bytes, &layout).is_ok(), valid);
        }
    }
}

/// What was sent last can be measured in either code, until the residual is looked at.
#[test]
fn the_last_step_is_measured_in_any_code() {
    let layout = small_model(Policy::adacomp());
    let mut compressor = Compressor::new(layout.clone());
    let mut random = Random(3);
    for step in 0..3 {
        let gradients = gradients(&layout, &mut random);
        compressor.compress(&named(&layout, &gradients)).unwrap();
        let mut taken = |codec| {
            compressor.encode(codec, 0, step, &mut Vec::new()).unwrap();
            [0, 1].map(|layer| compressor.layer_statistics(layer).bytes)
        };
        let (paper, rice) = (taken(Codec::Paper), taken(Codec::Rice));
        compressor.commit().unwrap();
        for layer in 0..2 {
            let packet = compressor.last_packet(layer).unwrap();
            assert_eq!(section_bytes(&layout, layer, packet, Codec::Paper), paper[layer]);
            assert_eq!(section_bytes(&layout, layer, packet, Codec::Rice), rice[layer]);
        }
        assert_eq!(compressor.last_packet(2), None);
    }
    let _ = compressor.residual(0);
    assert_eq!(compressor.last_packet(0), None);
}

/// Gaps below 0 were written as zeros until memory ended, where overflow is not checked.
#[test]
fn elements_out_of_order_or_range_are_not_written() {
    let layout = one_layer(100, 50);
    let panic = |write: &dyn Fn()| {
        let panic = std::panic::catch_unwind(std::panic::AssertUnwindSafe(write)).unwrap_err();
        panic.downcast_ref::<String>().cloned().unwrap_or_default()
    };
    for elements in [&[(5, false), (3, true)][..], &[(5, false), (5, true)], &[(5, false), (100, true)]] {
        for codec in [Codec::Rice, Codec::Paper] {
            let told = panic(&|| drop(frame(&layout, codec, [1.0, -1.0], elements)));
            assert_eq!(told, "not ascending, or of another layer than `weight`");
        }
    }
    for elements in [&[25, 23][..], &[19], &[25, 30], &[23, 29, 24, 26]] {
        let selected: Vec<_> = elements.iter().map(|&index| Selected::new(index, false)).collect();
        let told = panic(&|| encode_range(&selected, 20..30, &mut Vec::new()));
        assert_eq!(told, "elements are not ascending, or not in 20..30");
    }
}

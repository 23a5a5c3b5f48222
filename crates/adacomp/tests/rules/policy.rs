//! Which parameter is compressed, and how.

use adacomp::{Codec, Kind, Parameter, Policy, PolicyError, Scale, Treatment, UnknownName, growing_bin};

fn treatment(policy: &Policy, parameter: Parameter) -> Treatment {
    policy.layout([parameter]).expect("a valid layout")[0].treatment
}

#[test]
fn defaults_are_the_papers() {
    let policy = Policy::adacomp();
    assert_eq!(treatment(&policy, Parameter::new("conv", &[64, 3, 5, 5])), Treatment::Bins(50));
    assert_eq!(
        treatment(&policy, Parameter::new("conv1d", &[64, 32, 3]).with_kind(Kind::of(3, true))),
        Treatment::Bins(50)
    );
    assert_eq!(treatment(&policy, Parameter::new("fc", &[32, 32])), Treatment::Bins(500));
    assert_eq!(treatment(&policy, Parameter::new("bias", &[100_000])), Treatment::Dense);
    assert_eq!(treatment(&policy, Parameter::new("small", &[31, 33])), Treatment::Dense);
    assert_eq!(treatment(&policy, Parameter::new("scalar", &[])), Treatment::Dense);
    assert_eq!(treatment(&policy, Parameter::new("empty", &[0, 7])), Treatment::Dense);
    let layout = policy.layout([Parameter::new("fc", &[32, 32])]).unwrap();
    assert_eq!(layout.soft_threshold(), 2.0);
}

#[test]
fn bins_grow_by_the_same_factor() {
    let bins = |bin, steps| [0, 9, 10, 40, 79, 80, u64::MAX].map(|step| growing_bin(bin, step, steps));
    assert_eq!(bins(500, 80), [50, 50, 67, 158, 375, 500, 500]);
    assert_eq!(bins(20, 80), [20; 7]);
    assert_eq!(bins(500, 0), [500; 7]);
    assert_eq!(bins(500, 1)[..2], [50, 500]);
}

#[test]
fn kinds_follow_from_dimensions_and_the_module() {
    for (dimensions, in_convolution, kind) in [
        (0, true, Kind::Vector),
        (1, true, Kind::Vector),
        (2, true, Kind::Conv),
        (3, true, Kind::Conv),
        (2, false, Kind::Matrix),
        (3, false, Kind::Matrix),
        (4, false, Kind::Conv),
        (5, false, Kind::Conv),
    ] {
        assert_eq!(Kind::of(dimensions, in_convolution), kind, "{dimensions} {in_convolution}");
        assert!(in_convolution || Parameter::new("p", &vec![2; dimensions]).kind == kind);
    }
}

#[test]
fn names_are_read_as_they_are_written() {
    fn check<T: std::str::FromStr<Err = UnknownName> + ToString>(names: &[&str], told: &str) {
        for name in names {
            assert_eq!(name.parse::<T>().unwrap().to_string(), *name);
        }
        assert_eq!("x".parse::<T>().err().unwrap().to_string(), told);
    }
    check::<Kind>(&["conv", "matrix", "vector"], "kind `x`; expected conv, matrix or vector");
    check::<Codec>(&["rice", "paper"], "codec `x`; expected rice or paper");
    check::<Scale>(&["mean", "clamped"], "scale `x`; expected mean or clamped");
    let expected = "the number of elements of a bin, \"dense\", \"half\" or \"top-k 1.0\"";
    check::<Treatment>(
        &["500", "dense", "half", "top-k 1.5"],
        &format!("treatment `x`; expected {expected}"),
    );
    let words = |text: &str| format!("{:#}", text.parse::<Treatment>().unwrap());
    assert_eq!(
        ["500", "dense", "half", "top-k 1.5"].map(words),
        ["bins of 500", "dense", "f16", "largest 1.5%"]
    );
}

#[test]
fn rules_by_name_beat_size_beats_kind_and_the_last_name_wins() {
    let policy = Policy::adacomp()
        .min_elements(10)
        .for_kind(Kind::Matrix, Treatment::Bins(100))
        .for_name("head.*", Treatment::Dense)
        .for_name("head.?", Treatment::Bins(7));
    assert_eq!(treatment(&policy, Parameter::new("fc", &[2, 5])), Treatment::Bins(100));
    assert_eq!(treatment(&policy, Parameter::new("fc", &[3, 3])), Treatment::Dense);
    assert_eq!(treatment(&policy, Parameter::new("head.weight", &[100, 100])), Treatment::Dense);
    assert_eq!(treatment(&policy, Parameter::new("head.w", &[3])), Treatment::Bins(7));
    let embedding = Parameter::new("embedding", &[4, 4, 4]).with_kind(Kind::Matrix);
    assert_eq!(treatment(&policy, embedding), Treatment::Bins(100));
}

#[test]
fn bins_outside_1_to_16384_are_refused_by_name() {
    for (bin, valid) in [(0, false), (1, true), (16_384, true), (16_385, false), (u32::MAX, false)] {
        let layout = Policy::adacomp()
            .for_kind(Kind::Matrix, Treatment::Bins(bin))
            .layout([Parameter::new("fc", &[40, 40])]);
        let expected = PolicyError::Bin { parameter: "fc".to_owned(), bin };
        assert_eq!(layout.err(), (!valid).then_some(expected));
    }
}

#[test]
fn other_nonsense_is_refused() {
    let matrix = || Parameter::new("fc", &[40, 40]);
    for percent in [0.0, -1.0, 100.1, f32::NAN] {
        assert!(matches!(Policy::top_k(percent).layout([matrix()]), Err(PolicyError::TopK { .. })));
    }
    for factor in [0.9, f32::NAN, f32::INFINITY] {
        let error = Policy::adacomp().soft_threshold(factor).layout([matrix()]).unwrap_err();
        assert!(matches!(error, PolicyError::SoftThreshold { .. }));
    }
    let twice = Policy::adacomp().layout([matrix(), matrix()]).unwrap_err();
    assert_eq!(twice, PolicyError::Twice { parameter: "fc".to_owned() });
    let long = Policy::adacomp().layout([Parameter::new("huge", &[1 << 15, 1 << 15])]).unwrap_err();
    assert!(matches!(long, PolicyError::TooLong { elements: 1_073_741_824, .. }));
    let overflowing = Policy::adacomp().layout([Parameter::new("huge", &[1 << 32, 1 << 32])]).unwrap_err();
    assert!(matches!(overflowing, PolicyError::TooLong { .. }));
}

#[test]
fn the_fingerprint_tells_models_and_policies_apart() {
    let print = |policy: &Policy, parameters: &[Parameter]| {
        policy.layout(parameters.iter().cloned()).expect("a valid layout").fingerprint()
    };
    let (a, b) = (Parameter::new("a", &[40, 60]), Parameter::new("b", &[40, 60]));
    let base = print(&Policy::adacomp(), &[a.clone(), b.clone()]);
    assert_eq!(base, print(&Policy::adacomp(), &[a.clone(), b.clone()]));
    let others = [
        print(&Policy::adacomp(), &[b.clone(), a.clone()]),
        print(&Policy::adacomp(), std::slice::from_ref(&a)),
        print(&Policy::adacomp(), &[a.clone(), Parameter::new("b", &[60, 40])]),
        print(&Policy::local_selection(), &[a.clone(), b.clone()]),
        print(&Policy::adacomp().for_kind(Kind::Matrix, Treatment::Bins(499)), &[a.clone(), b.clone()]),
        print(&Policy::dense(), &[a.clone(), b.clone()]),
        print(&Policy::half(), &[a.clone(), b.clone()]),
        print(&Policy::top_k(0.1), &[a.clone(), b.clone()]),
        print(&Policy::top_k(0.2), &[a, b]),
    ];
    for (position, other) in others.iter().enumerate() {
        assert_ne!(base, *other);
        assert!(!others[..position].contains(other));
    }
}
